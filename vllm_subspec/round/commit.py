"""Commit: the accepted path's KV moves to consecutive positions of vLLM's paged KV cache (step 5 of the algorithm)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 32  # elements of a token's keys | values that one program moves


@triton.jit
def _move_kernel(
    kv_cache,  # [num_blocks, KH, PAGE, SIZE], SIZE = 2 * head size
    block_table,  # [max_blocks] int32
    context_len_ptr,  # [] integer
    path,  # [D + 1] int64
    length_ptr,  # [] integer, D at most
    block_stride,
    head_stride,
    token_stride,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    STEPS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """All of the path's steps, for one kv head and CHUNK elements: no other program reads or writes these."""
    steps = tl.arange(0, STEPS_PAD) + 1
    elements = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    context_len = tl.load(context_len_ptr).to(tl.int32)
    moved = steps <= tl.load(length_ptr)
    source = context_len + tl.load(path + steps, mask=moved, other=0).to(tl.int32)
    target = context_len + steps
    source_page = tl.load(block_table + source // PAGE, mask=moved, other=0).to(tl.int64)
    target_page = tl.load(block_table + target // PAGE, mask=moved, other=0).to(tl.int64)
    source_tokens = source_page * block_stride + source % PAGE * token_stride
    target_tokens = target_page * block_stride + target % PAGE * token_stride
    kv = kv_cache + tl.program_id(0).to(tl.int64) * head_stride
    inside = moved[:, None] & (elements < SIZE)[None, :]
    tile = tl.load(kv + source_tokens[:, None] + elements[None, :], mask=inside)
    tl.debug_barrier()  # a warp must not store to a slot that another has yet to load
    tl.store(kv + target_tokens[:, None] + elements[None, :], tile, mask=inside)


def move_kv(
    kv_caches: list[torch.Tensor],
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    path: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """Move the KV of nodes ``path[1 : length + 1]`` to those of nodes 1 .. length, in every cache.

    Node j lies at position context_len + j. All sources are read before any slot that is one of them is written.

    Args:
        kv_caches: [num_blocks, KH, B, 2 * D] each, all of one KV cache group; any strides, but the last is 1
        block_table: [max_blocks] int32, contiguous
        context_len: [] or [1] int32 or int64; read on the device only, as ``length``
        path: [D + 1] int64, the accepted path (see `accept`)
        length: [] int32 or int64, accepted tokens, D at most
    """
    max_length = path.shape[0] - 1
    if max_length == 0:
        return
    for kv_cache in kv_caches:
        _, kv_heads, page, size = kv_cache.shape
        _move_kernel[(kv_heads, triton.cdiv(size, CHUNK))](
            kv_cache, block_table, context_len, path, length, *kv_cache.stride()[:3],
            PAGE=page, SIZE=size, STEPS_PAD=triton.next_power_of_2(max_length), CHUNK=CHUNK,
        )  # fmt: skip


def commit(
    layers: list[torch.nn.Module],
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    path: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """`move_kv` for vLLM's Attention layers that own a cache, all of one KV cache group, at least one."""
    move_kv([layer.kv_cache for layer in layers], block_table, context_len, path, length)
