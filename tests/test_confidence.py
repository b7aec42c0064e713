"""Drafts that end early (`confidence_threshold`): they save draft passes and cost no token."""

from __future__ import annotations

import random

import engine
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prompts import requests
from test_lossless import tau, tokens
from trees import random_tree

from vllm_subspec.round.tree import TokenTree, accept

WIDTH, DEPTH = 4, 16


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.data())
def test_a_cut_tree_accepts_what_its_first_nodes_do(seed, num_nodes, data):
    """Catches: a node beyond the cut that is accepted, seen by another, or sees another; one before it that is lost."""
    torch.manual_seed(seed)
    tree = random_tree(random.Random(seed), num_nodes, vocabulary=3)
    kept = data.draw(st.integers(1, num_nodes))
    target = torch.randint(0, 3, (num_nodes,))
    before = tree.first(kept)
    before = TokenTree(*(t.clone() for t in vars(before).values()))
    tree.cut(kept)
    assert all(torch.equal(a, b) for a, b in zip(vars(tree.first(kept)).values(), vars(before).values()))
    path, length = accept(tree, target, num_nodes)
    expected_path, expected_length = accept(before, target[:kept], num_nodes)
    assert length == expected_length and torch.equal(path, expected_path)
    rest = tree.ancestors[kept:]
    assert torch.equal(rest, torch.eye(num_nodes, dtype=torch.bool)[kept:])


def test_early_ends_save_passes_and_cost_no_token(smollm2):
    """Catches: a token of a node that was not drafted, rows of an earlier draft still in the tree, full trees all the
    same, a draft that ends too early to be worth it; the same for sampled requests."""
    batches = [[r] for r in requests(32, 3)]
    batches[2][0]["params"] |= {"temperature": 0.7, "seed": 3, "max_tokens": 10}
    job = {"model": smollm2, "engine": {"max_model_len": 512}, "batches": batches}
    (plain,) = engine.plain([{**job, "batches": batches[:2]}])
    full, early = engine.subspec(
        [job, {**job, "spec": {"confidence_threshold": 0.5}}], tree_width=WIDTH, tree_depth=DEPTH
    )
    assert tokens(early) == tokens(full) and tokens(early)[:2] == tokens(plain)
    drafted = [[r["tree_size"] - 1 for r in answer["rounds"] if r["tree_size"] > 1] for answer in (full, early)]
    assert all(nodes % WIDTH == 0 for nodes in drafted[1])
    assert min(drafted[1]) < WIDTH * DEPTH == max(drafted[1])
    assert sum(drafted[1]) / len(drafted[1]) < 0.9 * sum(drafted[0]) / len(drafted[0])
    assert tau(early) > 0.75 * tau(full)
