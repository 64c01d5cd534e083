"""Tree arithmetic against step-by-step definitions."""

import random

import pytest
import torch

from paceline.ops import tree


def random_parents(size, *, seed):
    chooser = random.Random(seed)
    return [-1] + [chooser.randrange(node) for node in range(1, size)]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 9, 33])
def test_ancestors_are_the_nodes_met_on_the_way_up(size):
    rows = [random_parents(size, seed=seed) for seed in range(4)] + [tree.chain(size - 1)]
    mask = tree.ancestors(torch.tensor(rows))
    depth = tree.depths(torch.tensor(rows))
    for row, parents in enumerate(rows):
        for node in range(size):
            path = tree.path(parents, node=node)
            assert mask[row, node].nonzero().flatten().tolist() == sorted(path)
            assert path == sorted(path)
            assert path[0] == 0
            assert depth[row, node] == len(path) - 1


def test_padding_nodes_see_themselves_and_are_seen_by_nobody_else():
    parents = tree.stack([[-1, 0, 1], [-1]], fill=-1, size=5)
    assert parents.tolist() == [[-1, 0, 1, -1, -1], [-1, -1, -1, -1, -1]]
    mask = tree.ancestors(parents)
    assert mask[1].equal(torch.eye(5, dtype=torch.bool))
    assert mask[0, 3:].equal(torch.eye(5, dtype=torch.bool)[3:])
    assert tree.depths(parents).tolist() == [[0, 1, 2, 0, 0], [0, 0, 0, 0, 0]]


def test_stack_pads_to_the_longest_row_and_refuses_a_size_that_is_too_small():
    assert tree.stack([[7], [8, 9]], fill=0).tolist() == [[7, 0], [8, 9]]
    with pytest.raises(AssertionError):
        tree.stack([[1, 2, 3]], fill=0, size=2)


def test_children_and_leaf_paths_of_an_uneven_tree():
    parents = [-1, 0, 0, 1, 1, 4]
    assert tree.children(parents) == [[1, 2], [3, 4], [], [], [5], []]
    assert tree.leaf_paths(parents) == [[0, 2], [0, 1, 3], [0, 1, 4, 5]]
    assert tree.leaf_paths([-1]) == [[0]]
    assert tree.leaf_paths(tree.chain(3)) == [[0, 1, 2, 3]]


def keep(parents, scores, tokens, budget):
    kept = tree.best_nodes(parents, scores=scores, tokens=tokens, budget=budget)
    return kept, tree.reindex(parents, kept=kept)


def test_best_nodes_takes_the_highest_scores_level_by_level():
    parents = [-1, 0, 0, 1, 1, 2, 2]
    scores = [0.0, -1.0, -0.5, -1.5, -4.0, -0.6, -3.0]
    kept, new = keep(parents, scores, [0, 5, 6, 1, 2, 3, 4], 5)
    assert kept == [0, 2, 1, 5, 3]  # node 2 scores above its sibling 1, and its child 5 follows the same order
    assert new == [-1, 0, 0, 1, 2]


def test_a_child_with_log_q_zero_never_displaces_its_parent():
    # EAGLE's bookkeeping attaches such a child to a stranger (peers.md 1.6); here all scores tie exactly, and the
    # children even come first among the candidates of their level by token id.
    parents = [-1, 0, 0, 2, 3, 1]
    tokens = [0, 9, 8, 1, 0, 2]
    for budget in range(1, 7):
        kept, new = keep(parents, [0.0] * 6, tokens, budget)
        assert len(kept) == budget
        assert all(parents[node] in kept for node in kept[1:])
        assert all(parent < node for node, parent in enumerate(new))


@pytest.mark.parametrize("seed", range(30))
def test_best_nodes_on_random_trees_with_many_ties(seed):
    chooser = random.Random(seed)
    size = 40
    parents = random_parents(size, seed=seed)
    tokens = [chooser.randrange(1000) for _ in range(size)]
    scores = [0.0] * size
    for node in range(1, size):
        scores[node] = scores[parents[node]] + chooser.choice([0.0, 0.0, -1.0, -2.0, -float("inf")])
    budget = chooser.randrange(1, size + 5)
    kept, new = keep(parents, scores, tokens, budget)
    assert kept[0] == 0
    assert len(kept) == len(set(kept)) == min(budget, size)
    assert all(parents[node] in kept for node in kept[1:])
    assert all(-1 <= parent < node for node, parent in enumerate(new))
    dropped = set(range(size)) - set(kept)
    assert not dropped or min(scores[node] for node in kept) >= max(scores[node] for node in dropped)
    assert tree.depths(torch.tensor([new]))[0].tolist() == sorted(tree.depths(torch.tensor([new]))[0].tolist())
    for below in tree.children(new):
        assert below == sorted(below, key=lambda n: (-scores[kept[n]], tokens[kept[n]], kept[n]))
        assert not below or below == list(range(below[0], below[0] + len(below)))


def test_a_child_scored_above_its_parent_by_rounding_counts_as_equal():
    kept, new = keep([-1, 0, 1, 0], [0.0, -1.0, -0.9, -0.95], [0, 1, 2, 3], 3)
    assert kept == [0, 3, 1]
    assert new == [-1, 0, 0]


def test_front_index_is_a_permutation_that_starts_with_the_path():
    index = tree.front_index([[0, 2, 5], [0]], size=6)
    assert index.tolist() == [[0, 2, 5, 1, 3, 4], [0, 1, 2, 3, 4, 5]]
    rows = torch.arange(12).view(2, 6) * 10
    assert rows.gather(1, index)[0, :3].tolist() == [0, 20, 50]


def all_of_product(scores, depth):
    """Every node of the whole tree: path of ranks -> cumulative score."""
    found, level = {}, {(): 0.0}
    for place in range(depth):
        level = {(*path, k): sum_ + s for path, sum_ in level.items() for k, s in enumerate(scores[place])}
        found |= level
    return found


@pytest.mark.parametrize("budget", [1, 2, 5, 9, 40, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_a_product_are_the_best_of_the_whole_tree(budget, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = [torch.randn(7, generator=generator).log_softmax(0).topk(3).values.tolist() for _ in range(4)]
    tokens = [[10 * depth + k for k in range(3)] for depth in range(4)]
    parents, ids = tree.best_of_product(scores, tokens=tokens, root=99, budget=budget)
    assert (parents[0], ids[0]) == (-1, 99)
    assert all(parent < node for node, parent in enumerate(parents))
    every = all_of_product(scores, 4)
    best = sorted(every, key=lambda path: -every[path])[: budget - 1]
    paths = [tuple(ids[node] % 10 for node in tree.path(parents, node=place)[1:]) for place in range(1, len(ids))]
    assert sorted(paths) == sorted(best) and len(set(paths)) == len(paths)
    for below in tree.children(parents):
        assert [ids[node] % 10 for node in below] == list(range(len(below)))  # siblings best first


def test_a_sure_product_is_a_chain_and_an_impossible_token_is_no_node():
    scores = [[0.0, -torch.inf], [0.0, -torch.inf]]
    assert tree.best_of_product(scores, tokens=[[1, 2], [3, 4]], root=0, budget=9) == ([-1, 0, 1], [0, 1, 3])
    assert tree.best_of_product([], tokens=[], root=5, budget=9) == ([-1], [5])
