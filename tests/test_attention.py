"""Tree attention in torch against its definition."""

from __future__ import annotations

import math
import random

import pytest
import torch
from trees import random_tree

from vllm_subspec.cpu.attention import key_slots, tree_attention, visible_keys
from vllm_subspec.round.attention.metadata import KVGroup, tree_metadata


def by_definition(q, k, v, visible, scale, cap):
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[1])
            seen = [s for s in range(k.shape[0]) if visible[row, s]]
            scores = [float(q[row, head].double() @ k[s, kv_head].double()) * scale for s in seen]
            if cap:
                scores = [cap * math.tanh(x / cap) for x in scores]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            out[row, head] = sum(w * v[s, kv_head].double() for w, s in zip(weights, seen))
    return out


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_tree_attention_is_masked_softmax_attention(heads, cap):
    """Catches: heads grouped the wrong way, mask or cap misapplied, scale missing."""
    torch.manual_seed(0)
    q, k, v = torch.randn(5, heads[0], 16), torch.randn(9, heads[1], 16), torch.randn(9, heads[1], 16)
    visible = torch.rand(5, 9) < 0.5
    visible[:, 0] = True
    got = tree_attention(q, k, v, visible, 0.3, cap)
    torch.testing.assert_close(got.double(), by_definition(q, k, v, visible, 0.3, cap), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("seed", range(5))
def test_rows_see_context_ancestors_and_nothing_out_of_the_window(window, seed):
    """Catches: siblings or cousins visible, a window by slot instead of position, an off-by-one window."""
    tree, context_len = random_tree(random.Random(seed), 12, 4), 6
    rows = torch.arange(3, 12)
    group = KVGroup(["layer"], torch.tensor([7, 3, 5], dtype=torch.int32), torch.zeros(12))
    metadata = tree_metadata([group], torch.tensor(context_len), tree, rows, max_keys=64, max_rows=9)["layer"]
    assert key_slots(metadata, 8).tolist() == [7 * 8 + i for i in range(8)] + [3 * 8 + i for i in range(8)] + [40, 41]
    visible = visible_keys(metadata, window)
    positions = [*range(context_len), *(context_len + int(d) for d in tree.depths)]
    for i, row in enumerate(rows.tolist()):
        for key in range(context_len + 12):
            in_tree = key >= context_len
            expected = not in_tree or bool(tree.ancestors[row, key - context_len])
            if window is not None:
                expected &= positions[key] > positions[context_len + row] - window
            assert bool(visible[i, key]) == expected
