"""The frozen records that cross floors: trees, scores, verdicts, loss terms.

This module knows no model, no file and no option; it names what the rooms hand to each other.
Letters: B batch, T sequence, N tree nodes, K taps, H hidden, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a draft needs to know of a target to be built for it: sizes, positions, special ids. No weights.

    rope: the target's rotary settings as found in its configuration (either key layout).
    special_ids: ids that must always be in a reduced draft vocabulary (end of turn, end of text, ...).
    unsaid_ids: ids that no text of the target holds, the fittest first; a draft may give one a meaning of its own.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    rope: dict[str, object]
    special_ids: tuple[int, ...]
    unsaid_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TargetIdentity:
    """What a draft remembers of its target.

    name: as the user wrote it, without folders.  digest: of the weights (`store.fingerprint`).  vocab_size,
    hidden_size, num_layers: of the model.  tokens: name of each token id, None for ids without one; empty without a
    tokenizer.
    """

    name: str
    digest: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    tokens: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """A batch of proposals; node 0 of each row is the root, the last committed token, not yet seen by the target.

    tokens: [B, N] int64.  parents: [B, N] int64, index of the parent node, -1 at the root; parents come first.
    depths: [B, N] int64, 0 at the root.  mask: [B, N, N] bool, True where column is row's ancestor or itself.
    counts: real nodes of each row; the nodes from counts[b] on are padding that no rule may read.
    children: for each row and node, its children in the order in which they are tried.
    draft_law: for `sampled` proposals, the law that node n's children were drawn from, per row {n: [V]}; else None.
    log_laws: log of the law by which the draft grew node n's children, per row {n: [W] float32}, for the nodes that the
    draft was run at; None unless the proposer was asked for it (`Proposer.keeps_laws`).
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    mask: Tensor
    counts: list[int]
    children: list[list[list[int]]]
    draft_law: list[dict[int, Tensor]] | None = None
    log_laws: list[dict[int, Tensor]] | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """What one target call returns.

    logits: [B, N, V] float.  taps: [B, N, K*H] float, outputs of the tapped decoder layers side by side, or None.
    hidden: [B, N, H] float, the last hidden state after the target's final norm, or None.
    """

    logits: Tensor
    taps: Tensor | None = None
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one round for one row.

    path: accepted node indices from the root (always included) downwards; the rows of the target's cache to keep.
    tokens: the committed tokens.  accepted: how many of them, from the first on, the draft wrote.
    stopped: whether a stop condition ended the row; then the last token may be the draft's, and no other follows.
    """

    path: list[int]
    tokens: list[int]
    accepted: int
    stopped: bool


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A loss as numerator and denominator, so that averages are right across ranks, accumulation and mask sizes.

    numerator, denominator: scalars.  metrics: name -> (numerator, denominator), detached.
    """

    numerator: Tensor
    denominator: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
