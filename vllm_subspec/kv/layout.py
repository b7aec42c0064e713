"""Where a token's keys and values lie inside vLLM's KV cache.

On CUDA the logical order is [block, kv head, token in block, key | value]. vLLM's CPU kernels keep an order of their
own, which depends on the instruction set and the dtype (keys transposed, or packed in pairs). It is asked for once
per layer: numbered elements go through vLLM's own cache-writing kernel into a scratch block and are looked up there.
"""

from __future__ import annotations

import torch

PROBE_BASE = 256  # two digits below this are exact in every dtype that a KV cache has


def read_slots(layer: torch.nn.Module, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy keys and values out of a layer's cache.

    Args:
        layer: vLLM's Attention layer, bound to its cache
        slots: [s] int64, slot numbers as in vLLM's slot mapping

    Returns:
        keys [s, num_kv_heads, head_size], values [s, num_kv_heads, head_size_v], in the cache's dtype.
    """
    cache = layer.kv_cache
    block_size = cache.shape[2]
    block, offset = slots // block_size, slots % block_size
    if cache.device.type != "cpu":
        rows = cache[block, :, offset]  # [s, kv heads, 2 * head size]
        return rows[..., : layer.head_size], rows[..., layer.head_size :]
    halves = cache.view(*cache.shape[:2], 2, -1)  # [block, kv head, key | value, elements of one half]
    return tuple(
        halves[:, :, half][block[:, None, None], _heads(cache)[None, :, None], place[offset][:, None, :]]
        for half, place in enumerate(_places(layer))
    )


def _heads(cache: torch.Tensor) -> torch.Tensor:
    return torch.arange(cache.shape[1])


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
