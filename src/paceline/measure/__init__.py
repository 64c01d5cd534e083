"""Benchmarks and reports: what was measured, how often, and how far it can be trusted."""
