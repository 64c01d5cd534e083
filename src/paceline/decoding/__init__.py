"""Rounds of propose, score, verify and commit, and the plain loop that every claim is measured against."""
