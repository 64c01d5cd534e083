"""Plug-in folder: one training objective = one file, which declares the tensors it needs."""
