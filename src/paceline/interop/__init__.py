"""Plug-in folder and second door: one foreign format = one file, read and write."""
