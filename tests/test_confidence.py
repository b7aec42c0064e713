"""Drafts that end early (`confidence_threshold`): they save draft passes and cost no token."""

from __future__ import annotations

import random

import engine
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prompts import requests
from test_lossless import tau, tokens
from trees import random_tree

from vllm_subspec.round.draft import LAG, SubSpecSpeculator
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
    before = tree.prefix(kept)
    before = TokenTree(*(t.clone() for t in vars(before).values()))
    tree.discard_after(kept)
    assert all(torch.equal(a, b) for a, b in zip(vars(tree.prefix(kept)).values(), vars(before).values()))
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


class PinnedMemory:
    """A GPU that is late: what it copies to the host arrives when an event after it is waited for. Or one that is not."""

    def __init__(self, late: bool):
        self.late, self.level, self.on_the_way, self.arrived = late, 0, [], {}

    def __getitem__(self, level: int) -> PinnedMemory:
        self.level = level
        return self

    def copy_(self, score: torch.Tensor, non_blocking: bool) -> None:
        self.on_the_way.append((self.level, float(score)))
        if not self.late:
            self.arrive(len(self.on_the_way))

    def __float__(self) -> float:
        return self.arrived[self.level]

    def arrive(self, count: int) -> None:
        self.arrived |= dict(self.on_the_way[:count])


class Event:
    def __init__(self, memory: PinnedMemory):
        self.memory = memory

    def record(self) -> None:
        self.count = len(self.memory.on_the_way)

    def synchronize(self) -> None:
        self.memory.arrive(self.count)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("last", [0, 3, 9])
def test_how_deep_a_draft_goes_does_not_depend_on_who_is_faster(last, late):
    """Catches: a decision by whichever score the GPU wrote last, instead of a certain level's."""
    speculator, memory = object.__new__(SubSpecSpeculator), PinnedMemory(late)
    speculator.least_score, speculator._best = -1.0, memory
    speculator._passed = [Event(memory) for _ in range(20)]
    for level in range(20):
        speculator.scores = torch.tensor([0.0 if level < last else -2.0])
        if speculator._gives_up(level):
            break
    assert level == last + LAG
