"""Plug-in folder: one draft architecture = one file, with its own nested Config."""
