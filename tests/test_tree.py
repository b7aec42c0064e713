"""The tree's pure parts against their definitions in plain Python, on random cases."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import beam, path_to, random_tree, walk

from vllm_subspec.round.tree import TokenTree, accept, grow

seeds = st.integers(0, 2**32)


def logits_of(path: tuple[int, ...], seed: int, vocabulary: int) -> list[float]:
    rnd = random.Random(hash((path, seed)))
    return [rnd.gauss(0, 1) for _ in range(vocabulary)]


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 6), st.integers(1, 8), st.sampled_from([0.2, 1.0]))
def test_grow_is_the_best_first_beam_of_the_paper(seed, width, depth, temperature):
    """Catches: a wrong score, parent, token or level order; width > candidates of the root; temperature misplaced."""
    vocabulary = 12
    tree = TokenTree.empty(1 + width * depth)
    tree.tokens[0] = 5
    leaves, scores = torch.tensor([0]), torch.zeros(1)
    expected = beam(lambda p: logits_of(p, seed, vocabulary), 5, width, depth, temperature)
    for level in range(depth):
        new = torch.arange(1 + level * width, 1 + (level + 1) * width)
        paths = [tuple(tree.tokens[path_to(tree, int(n))].tolist()) for n in leaves]
        logits = torch.tensor([logits_of(p, seed, vocabulary) for p in paths])
        scores = grow(tree, leaves, scores, logits, new, temperature)
        got = [tuple(tree.tokens[path_to(tree, int(n))].tolist()) for n in new]
        assert got == [path for path, _ in expected[level]]
        torch.testing.assert_close(scores, torch.tensor([s for _, s in expected[level]]), rtol=1e-4, atol=1e-4)
        leaves = new


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 5), st.integers(1, 6))
def test_grown_masks_and_depths_follow_the_parents(seed, width, depth):
    """Catches: ancestor rows not inherited, self missing, depth off by one, a cut tree that is no tree."""
    torch.manual_seed(seed)
    tree = TokenTree.empty(1 + width * depth)
    leaves, scores = torch.tensor([0]), torch.zeros(1)
    for level in range(depth):
        new = torch.arange(1 + level * width, 1 + (level + 1) * width)
        scores = grow(tree, leaves, scores, torch.randn(len(leaves), 16), new, 0.5)
        leaves = new
    cut = tree.prefix(torch.randint(1, len(tree) + 1, ()).item())
    for node in range(len(cut)):
        path = path_to(cut, node)
        assert path == sorted(path)
        assert cut.depths[node] == len(path) - 1
        assert cut.ancestors[node].nonzero().flatten().tolist() == path
    siblings = list(zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist()))
    assert len(set(siblings)) == len(siblings)


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(1, 40), st.integers(2, 5))
def test_accept_is_the_walk_from_the_root(seed, num_nodes, vocabulary):
    """Catches: a match without its ancestors accepted, a path in wrong order, a wrong length, padding not zero."""
    rnd = random.Random(seed)
    tree = random_tree(rnd, num_nodes, vocabulary)
    target = [rnd.randrange(vocabulary) for _ in range(num_nodes)]
    path, length = accept(tree, torch.tensor(target), max_depth=num_nodes)
    expected = walk(tree, target)
    assert length == len(expected) - 1
    assert path[: length + 1].tolist() == expected
    assert not path[length + 1 :].any()


def test_accept_takes_a_whole_path_and_no_step_more():
    """Catches: the bonus lost at the deepest level; a root token that happens to equal the target's."""
    tree = random_tree(random.Random(1), 6, 3)
    tree.parents[:] = torch.tensor([0, 0, 1, 2, 3, 4])
    tree.depths[:] = torch.arange(6)
    tree.ancestors[:] = torch.ones(6, 6).tril().bool()
    path, length = accept(tree, torch.cat([tree.tokens[1:], torch.tensor([99])]), max_depth=5)
    assert length == 5 and path.tolist() == [0, 1, 2, 3, 4, 5]
    path, length = accept(tree, torch.full((6,), 99), max_depth=5)
    assert length == 0 and path.tolist() == [0] * 6
