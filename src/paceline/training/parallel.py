"""Devices and processes: which accelerator a run gets.

Plain data parallelism only: every process holds the whole draft.  It knows modules, not objectives.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType

from paceline.config import TrainingSection
from paceline.errors import ConfigError
from paceline.targets.generic import Target

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def make_accelerator(training: TrainingSection, *, out: Path, target: Target | None) -> Accelerator:
    """The process's accelerator, on the device of a target that is in memory, else where accelerate finds one."""
    if training.trackers and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("training.trackers: tensorboard is not installed; run: pip install tensorboard")
    accelerator = Accelerator(
        mixed_precision="no",  # the recipe's precision is set by our own autocast, see window.py
        cpu=target is not None and target.device.type == "cpu",
        log_with=list(training.trackers) or None,
        project_dir=str(out),
        # A draft's buffers are its vocabulary and what it borrows: the same everywhere, and never written.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    if accelerator.distributed_type in SHARDED:
        raise ConfigError(
            f"accelerate was told to use {accelerator.distributed_type.value}; a draft fits on one device: expected "
            "plain data parallelism (accelerate launch --multi_gpu, or torchrun)"
        )
    if training.trackers:
        accelerator.init_trackers("tensorboard")
    return accelerator
