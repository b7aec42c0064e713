"""Commit: the accepted path's KV moves to consecutive slots (step 5 of the algorithm)."""

from __future__ import annotations

import torch

from .layout import read_slots, slots_at
from .move_kernel import move_kv

PAD_SLOT = -1
"""vLLM's kernels write nothing to this slot."""


def commit(
    layers: list[torch.nn.Module],
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    path: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """Move the KV of tree nodes ``path[1 : length + 1]`` to the places of nodes 1 .. length, in every layer.

    Node i lies at logical position ``context_len + i``. All sources of a layer are read before any is overwritten:
    source and destination overlap.

    Args:
        layers: vLLM's Attention layers that own a cache, all of one KV cache group, at least one
        block_table: [max_blocks] int32, the request's row in that group
        context_len: [] int64
        path: [D + 1] int64, the accepted path (see `accept`)
        length: [] int32 or int64, accepted tokens
    """
    if path.device.type == "cuda":
        move_kv([layer.kv_cache for layer in layers], block_table, context_len, path, length)
        return
    if path.shape[0] == 1:
        return
    block_size = layers[0].kv_cache.shape[2]
    steps = torch.arange(1, path.shape[0], device=path.device)
    accepted = steps <= length
    source = slots_at(block_table, context_len + path[1:], block_size)
    target = slots_at(block_table, context_len + torch.where(accepted, steps, 0), block_size)
    target = torch.where(accepted, target, PAD_SLOT)
    for layer in layers:
        keys, values = read_slots(layer, source)
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, target)
