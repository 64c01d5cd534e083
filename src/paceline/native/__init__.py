"""Forward calls of a few rows in C++, for float32 on a processor: compiled once for a machine, read weights in place.

It knows neither models nor drafts: targets and drafts say where their weights lie, and keep their eager twin.
"""
