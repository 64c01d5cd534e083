"""C++ for a processor, compiled once for a machine: forward calls of a few rows in float32, which read weights in place,
and attention of one token per row in bfloat16.

It knows neither models nor drafts: targets and drafts say where their weights lie, and keep their eager twin.
"""
