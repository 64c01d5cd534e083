"""Plug-in folder: one command = one file; anything heavy is imported when the command runs."""
