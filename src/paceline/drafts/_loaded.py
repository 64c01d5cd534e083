"""A draft ready for use, and what is known of it beside its weights: the records that disks and decoding share.

It knows no file and no format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.drafts._base import DraftConfig, DraftNetwork
from paceline.records import TargetIdentity


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """What is known of a draft beside its weights.

    name: its plug-in.  config: its sizes.  target: for which it was made.  notes: plain values of whoever trained it
    (step, tokens, accepted length, longest example ...).
    """

    name: str
    config: DraftConfig
    target: TargetIdentity
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft ready for use, in evaluation mode, and what its folder says of it.

    dtype: "float32" or "bfloat16", of the weights on disk.
    """

    draft: DraftNetwork
    info: DraftInfo
    dtype: str = "float32"
