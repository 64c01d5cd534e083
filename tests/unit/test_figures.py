"""Figures in records and in messages: no digit that nobody measured, no size that reads as nothing."""

import pytest

from paceline.store.figures import rounded, size_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (15_000, "15.0 kB"),
        (99_949, "99.9 kB"),
        (100_000, "100 kB"),
        (92_871_040, "92.9 MB"),
        (542_000_000, "542 MB"),
        (6_912_345_678, "6.9 GB"),
        (2_500_000_000_000, "2500 GB"),
    ],
)
def test_a_small_size_does_not_read_as_nothing(num_bytes, text):
    assert size_text(num_bytes) == text


def test_figures_keep_six_digits():
    assert rounded({"a": 1 / 3, "n": 7, "in": {"b": 123456.789}}) == {"a": 0.333333, "n": 7, "in": {"b": 123457.0}}
