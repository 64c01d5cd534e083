"""Prompts, conversations and loss masks; what a row means, and nothing about features or optimisers."""
