"""Settings of the whole suite: one thread, so that two cores serve two processes and sums are repeatable."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
