"""The vocabulary map: offsets, ascending ids, forced ids, and tables that do not belong together."""

import pytest
import torch

from paceline.errors import CheckpointError, ConfigError
from paceline.ops.vocab import DraftVocab

COUNTS = torch.tensor([0, 5, 9, 0, 9, 1, 2, 9, 0, 3])


@pytest.mark.parametrize("size", [16, 24, 64])
def test_the_map_is_ascending_offsets_and_agrees_with_its_mask(size):
    counts = torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(size))
    vocab = DraftVocab.from_counts(counts, size=size, always=[0, 2, 63])
    ids = vocab.ids
    assert vocab.d2t.dtype == torch.int64
    assert vocab.t2d.dtype == torch.bool
    assert (ids[1:] > ids[:-1]).all()
    assert vocab.d2t.equal(ids - torch.arange(size))
    assert vocab.t2d.sum() == size == vocab.size
    assert vocab.t2d.nonzero().flatten().equal(ids)
    assert {0, 2, 63} <= set(ids.tolist())
    assert vocab.is_full == (size == 64)
    if size < 64:
        others = sorted(counts[i].item() for i in range(64) if i not in (0, 2, 63))
        chosen = sorted(counts[i].item() for i in ids.tolist() if i not in (0, 2, 63))
        assert chosen == others[-len(chosen) :]


def test_frequent_tokens_win_and_ties_go_to_the_smaller_id():
    assert DraftVocab.from_counts(COUNTS, size=2).ids.tolist() == [2, 4]
    assert DraftVocab.from_counts(COUNTS, size=4).ids.tolist() == [1, 2, 4, 7]
    assert DraftVocab.from_counts(COUNTS, size=4, always=[8, 0, 8]).ids.tolist() == [0, 2, 4, 8]
    assert DraftVocab.from_counts(COUNTS, size=8).ids.tolist() == [0, 1, 2, 4, 5, 6, 7, 9]


@pytest.mark.parametrize(
    ("size", "always", "text"),
    [(0, [], "1 to 10"), (11, [], "1 to 10"), (2, [1, 2, 3], "3 ids"), (4, [10], "0 to 9"), (4, [-1, 3], "0 to 9")],
)
def test_sizes_and_ids_that_cannot_be_are_refused(size, always, text):
    with pytest.raises(ConfigError, match=text):
        DraftVocab.from_counts(COUNTS, size=size, always=always)


def test_ids_go_there_and_back():
    vocab = DraftVocab.from_counts(COUNTS, size=4)
    draft = torch.arange(4).view(2, 2)
    assert vocab.to_target(draft).tolist() == [[1, 2], [4, 7]]
    assert vocab.to_draft(vocab.to_target(draft)).equal(draft)
    assert vocab.to_draft(torch.arange(10)).tolist() == [-1, 0, 1, -1, 2, -1, -1, 3, -1, -1]


def test_laws_go_there_and_back_and_their_mass_outside_is_known():
    vocab = DraftVocab.from_counts(COUNTS, size=4)
    law = torch.arange(20.0).view(2, 10) / 190
    inside = vocab.restrict(law)
    assert inside.equal(law[:, [1, 2, 4, 7]])
    wide = vocab.expand(inside)
    assert wide.equal(law * vocab.t2d)
    torch.testing.assert_close(vocab.coverage(law), wide.sum(-1))
    logits = vocab.expand(torch.zeros(4), fill=-torch.inf)
    assert logits.softmax(-1).tolist() == [0, 0.25, 0.25, 0, 0.25, 0, 0, 0.25, 0, 0]


def test_restricted_logits_give_the_renormalised_law():
    vocab = DraftVocab.from_counts(COUNTS, size=4)
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    law = logits.softmax(-1)
    expected = vocab.restrict(law) / vocab.coverage(law).unsqueeze(-1)
    torch.testing.assert_close(vocab.restrict(logits).softmax(-1), expected)


def test_a_full_vocabulary_changes_nothing():
    vocab = DraftVocab.full(6)
    row = torch.randn(2, 6)
    assert vocab.is_full
    assert vocab.d2t.tolist() == [0] * 6
    assert vocab.restrict(row) is row
    assert vocab.expand(row) is row
    assert vocab.to_draft(torch.arange(6)).equal(vocab.to_target(torch.arange(6)))


def test_tables_from_a_file_are_taken_as_they_are():
    vocab = DraftVocab.from_counts(COUNTS, size=4)
    for d2t, t2d in ((vocab.d2t, vocab.t2d), (vocab.d2t.int(), vocab.t2d.to(torch.uint8))):
        again = DraftVocab.from_tables(d2t, t2d=t2d)
        assert again.d2t.equal(vocab.d2t)
        assert again.t2d.equal(vocab.t2d)


def test_a_table_of_absolute_ids_is_refused_by_that_name():
    vocab = DraftVocab.from_counts(COUNTS, size=4)
    with pytest.raises(CheckpointError, match=r"absolute.*offsets"):
        DraftVocab.from_tables(vocab.ids, t2d=vocab.t2d)


def test_tables_that_disagree_are_refused():
    vocab = DraftVocab.from_counts(COUNTS, size=4)
    moved = vocab.d2t.clone()
    moved[2] += 1
    with pytest.raises(CheckpointError, match="draft id 2 to target id 5, t2d to 4"):
        DraftVocab.from_tables(moved, t2d=vocab.t2d)
    with pytest.raises(CheckpointError, match="3 entries and t2d 4"):
        DraftVocab.from_tables(vocab.d2t[:3], t2d=vocab.t2d)
    with pytest.raises(CheckpointError, match="shapes"):
        DraftVocab.from_tables(vocab.d2t.view(2, 2), t2d=vocab.t2d)
    with pytest.raises(CheckpointError, match=r"float32.*expected int64"):
        DraftVocab.from_tables(vocab.d2t.float(), t2d=vocab.t2d)
    swapped = DraftVocab.from_tables(vocab.d2t, t2d=vocab.t2d).ids[[1, 0, 2, 3]] - torch.arange(4)
    with pytest.raises(CheckpointError, match="ascending"):
        DraftVocab.from_tables(swapped, t2d=vocab.t2d)
