"""Commit: the accepted path's KV moves to consecutive slots (step 5 of the algorithm)."""

from __future__ import annotations

import torch

from .layout import read_slots

PAD_SLOT = -1
"""vLLM's kernels write nothing to this slot."""


def commit(layers: list[torch.nn.Module], slots: torch.Tensor, path: torch.Tensor, length: torch.Tensor) -> None:
    """Move the KV of ``path[1 : length + 1]`` to the slots of nodes 1 .. length, in every layer.

    All sources of a layer are read before any of its slots is written: source and destination overlap.

    Args:
        layers: vLLM's Attention layers that own a cache, all of one KV cache group
        slots: [N] int64, the slot of each tree node in that group
        path: [D + 1] int64, the accepted path (see `accept`)
        length: [] int64, accepted tokens
    """
    steps = torch.arange(1, path.shape[0], device=path.device)
    source = slots[path[1:]]
    target = torch.where(steps <= length, slots[steps.clamp(max=slots.shape[0] - 1)], PAD_SLOT)
    for layer in layers:
        keys, values = read_slots(layer, source)
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, target)
