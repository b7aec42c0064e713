"""Reading and compacting vLLM's own KV cache."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from vllm_subspec.cpu.kv import commit, read_slots, slots_at

KV_HEADS, SIZE, BLOCK = 3, 64, 32


class Cache:
    """An attention layer as `read_slots` and `commit` see it, over vLLM's CPU cache and its own writing kernel."""

    def __init__(self, dtype: torch.dtype, blocks: int = 6, size: int = SIZE):
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

        self.isa = _get_attn_isa(dtype, BLOCK, size)
        self._k_scale_float = self._v_scale_float = 1.0
        self.head_size = size
        self.kv_cache = torch.zeros(blocks, KV_HEADS, BLOCK, 2 * size, dtype=dtype)
        self.impl = SimpleNamespace(attn_type="decoder", kv_cache_dtype="auto")
        update = CPUAttentionBackendImpl.do_kv_cache_update
        self.impl.do_kv_cache_update = lambda *args: update(self.impl, *args)

    def write(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (len(slots), KV_HEADS, self.head_size)
        keys, values = (torch.randn(shape).to(self.kv_cache.dtype) for _ in range(2))
        self.impl.do_kv_cache_update(self, keys, values, self.kv_cache, slots)
        return keys, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 80])
def test_read_slots_returns_what_vllm_wrote(dtype, size):
    """Catches: a cache layout (instruction set, dtype, head size) other than assumed; keys and values exchanged."""
    torch.manual_seed(0)
    cache = Cache(dtype, size=size)
    slots = torch.randperm(6 * BLOCK)
    keys, values = cache.write(slots)
    some = torch.tensor([5, 0, 150, 77, 3])
    got_keys, got_values = read_slots(cache, slots[some])
    assert torch.equal(got_keys, keys[some]) and torch.equal(got_values, values[some])


@pytest.mark.parametrize("seed", range(20))
def test_commit_moves_overlapping_paths(seed):
    """Catches: a slot overwritten before it was read, another slot touched, the root moved, a block border missed."""
    rnd = random.Random(seed)
    torch.manual_seed(seed)
    cache = Cache(torch.float32)
    table = torch.randperm(6).int()  # consecutive blocks of a request lie anywhere
    slots = slots_at(table, torch.arange(6 * BLOCK), BLOCK)
    keys, values = cache.write(slots)
    context_len, depth = rnd.randrange(0, 90), rnd.randrange(1, 60)
    length = rnd.randrange(0, depth + 1)
    path = [0, *sorted(rnd.sample(range(1, depth + 1), length))]
    padded = torch.tensor(path + [0] * (depth - length))
    commit([cache], table, torch.tensor(context_len), padded, torch.tensor(length))
    got_keys, got_values = read_slots(cache, slots)
    before, tree = list(range(context_len)), [context_len + n for n in path]
    moved = before + tree + list(range(context_len + len(path), 6 * BLOCK))  # the rest stays
    assert torch.equal(got_keys, keys[moved]) and torch.equal(got_values, values[moved])
