"""Masks against loops over what each query may see."""

import pytest
import torch

from paceline.ops import masks, tree


def seen(mask):
    return [row.nonzero().flatten().tolist() for row in mask]


def test_causal_mask_with_and_without_a_window():
    assert seen(masks.causal_mask(4)[0, 0]) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert seen(masks.causal_mask(4, window=2)[0, 0]) == [[0], [0, 1], [1, 2], [2, 3]]


def test_window_means_what_it_means_in_transformers():
    from transformers.masking_utils import sliding_window_causal_mask_function

    theirs = sliding_window_causal_mask_function(3)
    ours = masks.causal_mask(8, window=3)[0, 0]
    for query in range(8):
        for key in range(8):
            assert bool(ours[query, key]) == bool(theirs(0, 0, torch.tensor(query), torch.tensor(key)))


def test_documents_do_not_see_each_other_and_padding_sees_itself():
    mask = masks.document_mask(torch.tensor([[0, 0, 1, 1, 1, -1, -1], [3, 3, 3, 3, 3, 3, 3]]))
    assert mask.shape == (2, 1, 7, 7)
    assert seen(mask[0, 0]) == [[0], [0, 1], [2], [2, 3], [2, 3, 4], [5], [6]]
    assert mask[1, 0].equal(masks.causal_mask(7)[0, 0])


@pytest.mark.parametrize("window", [None, 1, 3])
def test_unrolled_mask_shows_what_a_draft_that_left_at_t_would_have_seen(window):
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, -1]])
    length = documents.shape[1]
    for step in range(4):
        mask = masks.unrolled_mask(documents, step=step, window=window)[0, 0]
        assert mask.shape == (length, (step + 1) * length)
        for t in range(length):
            expected = set()
            for key_step in range(step + 1):
                for s in range(length):
                    same = documents[0, s] == documents[0, t] and documents[0, t] >= 0
                    reachable = ((s <= t and same) or s == t) if key_step == 0 else s == t
                    is_near = window is None or s + key_step > t + step - window
                    if documents[0, t] < 0 and key_step == 0:
                        is_near = True
                    if reachable and is_near:
                        expected.add(key_step * length + s)
            assert set(mask[t].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("window", [None, 2, 4])
def test_prefix_tree_mask_with_ragged_rows_holes_and_stale_slots(window):
    parents = torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, 1, -1, -1]])
    depth = tree.depths(parents)
    capacity = 14
    # Row 0: 3 left pads, then positions 0..4. Row 1: positions 0..2, a hole, position 3, and a stale key at slot 9
    # that the tree overwrites.
    slot_positions = torch.full((2, capacity), -1)
    slot_positions[0, 3:8] = torch.arange(5)
    slot_positions[1, 0:3] = torch.arange(3)
    slot_positions[1, 5] = 3
    slot_positions[1, 9] = 0
    slots = torch.tensor([[8, 9, 10, 11, 12], [8, 9, 10, 11, 13]])
    roots = torch.tensor([5, 4])
    positions = masks.tree_positions(roots, depths=depth)
    assert positions.tolist() == [[5, 6, 6, 7, 8], [4, 5, 6, 4, 4]]
    mask = masks.prefix_tree_mask(
        slot_positions,
        tree_mask=tree.ancestors(parents),
        tree_slots=slots,
        tree_positions=positions,
        window=window,
    )
    assert mask.shape == (2, 1, 5, capacity)
    for row in range(2):
        for node in range(5):
            at = int(positions[row, node])
            expected = {}
            for slot in range(capacity):
                if slot_positions[row, slot] >= 0 and slot not in slots[row].tolist():
                    expected[slot] = int(slot_positions[row, slot])
            for other in tree.path(parents[row].tolist(), node=node):
                expected[int(slots[row, other])] = int(positions[row, other])
            visible = {slot for slot, position in expected.items() if window is None or position > at - window}
            assert set(mask[row, 0, node].nonzero().flatten().tolist()) == visible


def test_a_chain_behind_a_plain_prefix_is_the_tail_of_the_causal_mask():
    lengths = torch.tensor([3])
    slot_positions = masks.prefix_slots(lengths, capacity=7)
    assert slot_positions.tolist() == [[0, 1, 2, -1, -1, -1, -1]]
    parents = torch.tensor([tree.chain(3)])
    for window in (None, 2):
        mask = masks.prefix_tree_mask(
            slot_positions,
            tree_mask=tree.ancestors(parents),
            tree_slots=torch.arange(3, 7).unsqueeze(0),
            tree_positions=masks.tree_positions(lengths, depths=tree.depths(parents)),
            window=window,
        )
        assert mask[0, 0].equal(masks.causal_mask(7, window=window)[0, 0, 3:])


def test_additive_mask_is_zero_where_visible_and_lowest_elsewhere():
    added = masks.additive_mask(masks.causal_mask(2), dtype=torch.float16)
    assert added.dtype == torch.float16
    assert added[0, 0].tolist() == [[0.0, torch.finfo(torch.float16).min], [0.0, 0.0]]
