"""Who may attend to whom, as boolean masks (true = may look).

A slot (where a key is stored) and a position (what its rotary angle says) are different things here, and both are
given by the caller; nothing is inferred from the length of a cache. It knows no caches and no attention kernels.
A sliding window of w follows transformers: a query at position t sees keys at positions greater than t - w.
"""

import torch
from torch import Tensor


def document_mask(documents: Tensor, *, window: int | None = None) -> Tensor:
    """Causal attention inside each packed document.

    documents: [B, T] int64, the document of each position, -1 for padding; a document is one contiguous run.
    Returns [B, 1, T, T] bool.  A padding position sees only itself, so that no row is empty.
    """
    return _within_documents(documents, window=window, ahead=0)


def causal_mask(length: int, *, window: int | None = None) -> Tensor:
    """Plain causal attention over one document of `length` positions.  Returns [1, 1, T, T] bool."""
    return document_mask(torch.zeros(1, length, dtype=torch.int64), window=window)


def unrolled_mask(documents: Tensor, *, step: int, window: int | None = None) -> Tensor:
    """Attention of unroll step j in EAGLE-3's training-time test (arXiv 2503.01840).

    The keys of all steps so far lie one after the other: T of step 0, T of step 1, ..., T of step j. A query at index
    t of step j stands for position t + j of a draft that left the text at t: it sees step 0 up to t, and of each later
    step only the key at its own index.
    documents: [B, T] int64, -1 for padding.  step: j, 0-based.  window: in positions, where step i at index t is t + i.
    Returns [B, 1, T, (j + 1) * T] bool.
    """
    batch, length = documents.shape
    text = _within_documents(documents, window=window, ahead=step)
    own = torch.eye(length, dtype=torch.bool, device=documents.device).expand(batch, 1, length, length)
    later = [own if window is None or step - i < window else torch.zeros_like(own) for i in range(1, step + 1)]
    return torch.cat([text, *later], dim=-1)


def _within_documents(documents: Tensor, *, window: int | None, ahead: int) -> Tensor:
    index = torch.arange(documents.shape[1], device=documents.device)
    query, key = index.unsqueeze(1), index.unsqueeze(0)
    together = documents.unsqueeze(2) == documents.unsqueeze(1)  # [B, T, T]
    visible = together & (key <= query) & (documents >= 0).unsqueeze(1)
    if window is not None:
        visible &= key > query + ahead - window
    padding = (documents < 0).unsqueeze(2) & (key == query)
    return (visible | padding).unsqueeze(1)


def prefix_slots(lengths: Tensor, *, capacity: int) -> Tensor:
    """The slot table of a cache whose row b holds positions 0 .. lengths[b] - 1 in its first slots.

    lengths: [B] int64, cached rows (not counting the root, which is scored with its tree).
    Returns [B, S] int64: the position kept in each slot, -1 for a slot that holds nothing to see.
    """
    slot = torch.arange(capacity, device=lengths.device).unsqueeze(0)
    return slot.where(slot < lengths.unsqueeze(1), -1)


def tree_positions(root_positions: Tensor, *, depths: Tensor) -> Tensor:
    """Positions of tree nodes: the root's, which is the number of committed tokens - 1, plus the depth.

    root_positions: [B] int64.  depths: [B, N] int64.  Returns [B, N] int64.
    """
    return root_positions.unsqueeze(1) + depths


def prefix_tree_mask(
    slot_positions: Tensor, *, tree_mask: Tensor, tree_slots: Tensor, tree_positions: Tensor, window: int | None = None
) -> Tensor:
    """A draft tree behind a committed prefix, each row with its own length, holes and padding.

    slot_positions: [B, S] int64, position of the committed key in each slot, -1 where there is none.
    tree_mask: [B, N, M] bool, which of M nodes behind the prefix each of N sees, itself included; M = N with a window.
    tree_slots: [B, M] int64, the slot where each node's key is written;
    whatever a slot held before is replaced, and no two nodes of a row share one.
    tree_positions: [B, N] int64.  window: sliding window or None.
    Returns [B, 1, N, S] bool.
    """
    nodes = tree_mask.shape[1]
    committed = slot_positions.unsqueeze(1)  # [B, 1, S]
    prefix = (committed >= 0).expand(-1, nodes, -1)
    tree = tree_mask
    if window is not None:
        oldest = tree_positions.unsqueeze(2) - window  # [B, N, 1]
        prefix = prefix & (committed > oldest)
        tree = tree & (tree_positions.unsqueeze(1) > oldest)
    slots = tree_slots.unsqueeze(1).expand(-1, nodes, -1)
    return prefix.scatter(2, slots, tree).unsqueeze(1)


def additive_mask(visible: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The same mask as a term to add to attention scores: 0 where visible, the dtype's lowest number elsewhere."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
