"""The two vocabularies: which target tokens a draft can say, and how laws and ids pass between them.

Draft ids are given out in ascending order of target id, and the stored table holds offsets:
target id = draft id + d2t[draft id] (as EAGLE-3). It knows no tokenizer: which ids are special is the caller's word.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocab:
    """A reduced vocabulary of W of the target's V tokens, in the form in which a draft's weight file holds it.

    d2t: [W] int64, offsets.  t2d: [V] bool, true where the target's token is in the draft's vocabulary.
    """

    d2t: Tensor
    t2d: Tensor

    @classmethod
    def from_counts(cls, counts: Tensor, *, size: int, always: Iterable[int] = ()) -> "DraftVocab":
        """The `size` most frequent tokens, with some ids in whatever their counts; ties go to the smaller id.

        counts: [V] int64 or float, occurrences at supervised positions.  size: W.  always: target ids, for example
        special, end-of-sequence and action tokens.  Raises ConfigError when that cannot be done.
        """
        total = counts.shape[0]
        wanted = sorted(set(always))
        if not 1 <= size <= total:
            raise ConfigError(f"draft vocabulary size is {size}; expected 1 to {total}, the target's vocabulary")
        if wanted and not (wanted[0] >= 0 and wanted[-1] < total):
            raise ConfigError(f"ids to include run from {wanted[0]} to {wanted[-1]}; expected 0 to {total - 1}")
        if len(wanted) > size:
            raise ConfigError(f"draft vocabulary size is {size}, but {len(wanted)} ids must be in it; raise the size")
        is_wanted = torch.zeros(total, dtype=torch.bool, device=counts.device)
        is_wanted[wanted] = True
        by_count = counts.argsort(descending=True, stable=True)
        by_claim = by_count[is_wanted[by_count].logical_not().to(torch.uint8).argsort(stable=True)]
        return cls._from_ids(by_claim[:size].sort().values, total=total)

    @classmethod
    def full(cls, total: int) -> "DraftVocab":
        """The target's whole vocabulary; its tables say nothing and need not be stored."""
        return cls._from_ids(torch.arange(total), total=total)

    @classmethod
    def from_tables(cls, d2t: Tensor, *, t2d: Tensor) -> "DraftVocab":
        """Tables as read from a file, checked against each other.

        d2t: [W] integers.  t2d: [V] bool or 0/1.  Raises CheckpointError if they are not a pair of this form; a table
        of absolute ids instead of offsets is named as such.
        """
        if d2t.dim() != 1 or t2d.dim() != 1 or not 1 <= d2t.shape[0] <= t2d.shape[0]:
            shapes = f"{list(d2t.shape)} and {list(t2d.shape)}"
            raise CheckpointError(f"d2t and t2d have shapes {shapes}; expected [W] and [V] with 1 <= W <= V")
        if d2t.dtype.is_floating_point or t2d.dtype.is_floating_point:
            raise CheckpointError(f"d2t and t2d are {d2t.dtype} and {t2d.dtype}; expected int64 and bool")
        vocab = cls._from_ids(t2d.bool().nonzero().flatten(), total=t2d.shape[0])
        offsets = d2t.to(torch.int64)
        if offsets.equal(vocab.d2t):
            return vocab
        if offsets.equal(vocab.ids):
            raise CheckpointError(
                "d2t holds absolute target ids; expected offsets (target id - draft id): subtract 0, 1, 2, ... from it"
            )
        if vocab.size != offsets.shape[0]:
            found = f"d2t has {offsets.shape[0]} entries and t2d {vocab.size} true ones"
            raise CheckpointError(f"{found}; expected the same number: the tables are not of one draft")
        first = int((offsets != vocab.d2t).nonzero()[0])
        raise CheckpointError(
            f"d2t maps draft id {first} to target id {first + int(offsets[first])}, t2d to {int(vocab.ids[first])}; "
            "expected ascending ids and tables that agree: rebuild the map from the counts"
        )

    @classmethod
    def _from_ids(cls, ids: Tensor, *, total: int) -> "DraftVocab":
        t2d = torch.zeros(total, dtype=torch.bool, device=ids.device)
        t2d[ids] = True
        return cls(d2t=ids - torch.arange(ids.shape[0], device=ids.device), t2d=t2d)

    @property
    def size(self) -> int:
        """W."""
        return self.d2t.shape[0]

    @property
    def target_size(self) -> int:
        """V."""
        return self.t2d.shape[0]

    @property
    def is_full(self) -> bool:
        """Whether draft ids and target ids are the same."""
        return self.size == self.target_size

    @property
    def ids(self) -> Tensor:
        """[W] int64: the target id of each draft id, strictly increasing."""
        return torch.arange(self.size, device=self.d2t.device) + self.d2t

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """[...] int64 draft ids -> [...] int64 target ids."""
        return draft_ids + self.d2t[draft_ids]

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """[...] int64 target ids -> [...] int64 draft ids, -1 where the draft has no such token."""
        rank = self.t2d.cumsum(dim=0) - 1
        return rank.masked_fill(~self.t2d, -1)[target_ids]

    def restrict(self, values: Tensor) -> Tensor:
        """The draft's columns of a target row: [..., V] -> [..., W]; of logits, softmax then renormalises."""
        return values if self.is_full else values.index_select(-1, self.ids)

    def expand(self, values: Tensor, *, fill: float = 0.0) -> Tensor:
        """A draft row among the target's columns: [..., W] -> [..., V].

        fill: what the tokens outside get: 0 for a law, -inf for logits.
        """
        if self.is_full:
            return values
        wide = values.new_full((*values.shape[:-1], self.target_size), fill)
        return wide.index_copy_(-1, self.ids, values)

    def coverage(self, law: Tensor) -> Tensor:
        """Mass of a target law inside the draft's vocabulary: [..., V] float -> [...] float."""
        return self.restrict(law).sum(dim=-1)
