"""The KV cache of vLLM's CPU builds: where a token's keys and values lie in it, and the commit.

Its order depends on the instruction set and the dtype (keys transposed, or packed in pairs). It is asked for once per
layer: numbered elements go through vLLM's own cache-writing kernel into a scratch block and are looked up there.
"""

from __future__ import annotations

import torch

PAD_SLOT = -1
"""vLLM's kernels write nothing to this slot."""
PROBE_BASE = 256  # two digits below this are exact in every dtype that a KV cache has


def slots_at(block_table: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slot numbers, as in vLLM's slot mapping, of a request's logical positions.

    Args:
        block_table: [max_blocks] int32, the request's row
        positions: [s] int64, inside the blocks that the request holds
    """
    return block_table[positions // block_size].long() * block_size + positions % block_size


def read_slots(layer: torch.nn.Module, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy keys and values out of a layer's cache.

    Args:
        layer: vLLM's Attention layer, bound to its cache
        slots: [s] int64

    Returns:
        keys, values: [s, num_kv_heads, head_size] each, in the cache's dtype.
    """
    cache = layer.kv_cache
    block_size = cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    halves = cache.view(*cache.shape[:2], 2, -1)  # [block, kv head, key | value, elements of one half]
    heads = torch.arange(cache.shape[1])
    keys, values = (
        halves[:, :, half][block[:, None, None], heads[None, :, None], place[offset][:, None, :]]
        for half, place in enumerate(_places(layer))
    )
    return keys, values


def _places(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """For keys and values: [block_size, head_size] int64, index of an element inside its half of a block and head."""
    if not hasattr(layer, "_subspec_kv_places"):
        layer._subspec_kv_places = _probe(layer)
    return layer._subspec_kv_places


def _probe(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    _, num_kv_heads, block_size, _ = layer.kv_cache.shape
    size = layer.head_size
    numbers = torch.arange(block_size * size)
    read = torch.zeros(2, numbers.numel(), dtype=torch.int64)  # which element lies at each place of a half
    for digit, scale in ((numbers % PROBE_BASE, 1), (numbers // PROBE_BASE, PROBE_BASE)):
        scratch = torch.zeros_like(layer.kv_cache[:1])
        written = digit.view(block_size, 1, size).expand(-1, num_kv_heads, -1).to(scratch.dtype).contiguous()
        layer.impl.do_kv_cache_update(layer, written, written.clone(), scratch, torch.arange(block_size))
        read += scale * scratch[0, 0].reshape(2, -1).long()
    places = torch.empty_like(read).scatter_(1, read, numbers.expand(2, -1))
    keys, values = places.view(2, block_size, size)
    return keys, values


def commit(
    layers: list[torch.nn.Module],
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    path: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """`vllm_subspec.round.commit.commit` on CPU. All sources of a layer are read before any is overwritten."""
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
