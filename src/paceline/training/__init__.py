"""Capture, collate, unroll and train; knows drafts and objectives only by their contracts."""
