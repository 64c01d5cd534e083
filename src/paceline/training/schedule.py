"""The learning rate as a pure function of the step: linear warm-up, then a cosine down to a share of the peak.

It knows no optimiser: the trainer asks before every step, so that there is no state to save or to restore.
"""

from __future__ import annotations

import math


def peak_share(step: int, *, total: int, warmup: int, min_ratio: float) -> float:
    """Share of the peak rate at optimiser step `step`, counted from 0 to total - 1.

    Step 0 of a warm-up of n steps takes 1 / n, step n - 1 the whole peak; the last step takes min_ratio exactly,
    unless the warm-up is as long as the run.  min_ratio: in [0, 1].
    """
    assert 0 <= step < total, f"step {step} of {total}"
    if step < warmup:
        return (step + 1) / warmup
    falling = total - warmup  # steps of the cosine, of which the first still takes the peak
    share = (step - warmup) / (falling - 1) if falling > 1 else 1.0
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * share))
