"""Targets: frozen language models that verify; a family has its own file only where it really differs."""
