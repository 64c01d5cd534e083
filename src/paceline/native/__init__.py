"""C++ for a processor, compiled once for a machine: forward calls in float32, attention of single tokens in bfloat16.

It knows neither models nor drafts: targets and drafts say where their weights lie, and keep their eager twin.
"""
