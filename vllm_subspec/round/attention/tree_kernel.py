"""Tree attention in Triton, straight from vLLM's paged KV cache.

Shapes and strides decide grid and workspace; how long the context is, only the kernels know: a captured CUDA graph
stays valid while the context grows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

PROGRAMS = 264
"""Programs worth having at once: two for each multiprocessor of an H200 (132) or an RTX 4090 (128)."""
TILE_BYTES = 16384
"""Bytes of one tile of keys, or of values, and half those of one of queries, in 16 bits: with NUM_STAGES of the former,
they stay below the 99 KiB of shared memory that a block of threads has on an RTX 30 or later (227 on an H200)."""
NUM_STAGES = 2
MIN_BLOCKS_PER_SPLIT = 2
COMBINE_TILE = 8192  # elements that a program of the combining kernel holds in registers


@triton.jit
def _attend(
    q,  # [BLOCK_M, D_PAD]
    peak,  # [BLOCK_M], largest score so far, times log2(e) as all scores
    total,  # [BLOCK_M], sum of exp2(score - peak)
    acc,  # [BLOCK_M, D_PAD], the same sum, of the values
    keys,  # [BLOCK_N] logical positions
    readable,  # [BLOCK_N] bool or None (all): keys that some row sees. The slots of the others may hold NaN
    visible,  # [BLOCK_M, BLOCK_N] bool or None (all)
    kv,  # the cache at this kv head
    block_table,
    block_stride,
    token_stride,
    inner_scale,
    outer_scale,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Online softmax: (peak, total, acc) with one more block of keys taken in."""
    dims = tl.arange(0, D_PAD)
    page = tl.load(block_table + keys // PAGE, mask=readable, other=None if readable is None else 0).to(tl.int64)
    tokens = page * block_stride + keys % PAGE * token_stride
    pointers = kv + tokens[:, None] + dims[None, :]
    inside = (dims < D)[None, :]
    if readable is not None:
        inside = inside & readable[:, None]
    k = tl.load(pointers, mask=inside, other=0.0)
    v = tl.load(pointers + D, mask=inside, other=0.0)

    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * inner_scale
    if CAPPED:
        scores = outer_scale * (1 - 2 / (tl.exp2(scores) + 1))  # tanh(x) = 1 - 2 / (e^2x + 1), also where e^2x is inf
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))

    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a row that has seen nothing yet: no -inf - -inf
    decay = tl.exp2(peak - base)
    p = tl.exp2(scores - base[:, None])
    total = total * decay + tl.sum(p, 1)
    acc = acc * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return new_peak, total, acc


# Row and node counts shrink with a request's last tree: no variant of the kernel for those divisible by 16.
@triton.jit(do_not_specialize=["num_rows", "num_nodes"])
def _attention_kernel(
    out,  # [r, H, D], if NUM_SPLITS is 1
    partial,  # [NUM_SPLITS, r, H, D] fp32, acc of each split, if NUM_SPLITS is more
    stats,  # [2, NUM_SPLITS, r, H] fp32, peak and total of each split, likewise
    query,  # [r, H, D]
    kv_cache,  # [num_blocks, KH, PAGE, 2 * D]
    block_table,  # [max_blocks] int32
    context_len_ptr,  # [] integer
    mask,  # [r, s] uint8
    row_positions,  # [r] int64
    node_positions,  # [s] int64
    num_rows,
    num_nodes,
    inner_scale,
    outer_scale,
    query_row_stride,
    query_head_stride,
    out_row_stride,
    out_head_stride,
    block_stride,
    head_stride,
    token_stride,
    mask_stride,
    GROUP: tl.constexpr,  # query heads of a kv head
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CAPPED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A tile of BLOCK_M (row, head of the group) pairs of one kv head, over one split of the keys."""
    kv_head, split = tl.program_id(1), tl.program_id(2)
    pairs = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows, heads = pairs // GROUP, kv_head * GROUP + pairs % GROUP
    row_valid = rows < num_rows
    dims = tl.arange(0, D_PAD)
    valid = row_valid[:, None] & (dims < D)[None, :]
    q_offsets = rows[:, None] * query_row_stride + heads[:, None] * query_head_stride + dims[None, :]
    q = tl.load(query + q_offsets, mask=valid, other=0.0)
    kv = kv_cache + kv_head.to(tl.int64) * head_stride

    context_len = tl.load(context_len_ptr).to(tl.int32)
    first_key = 0
    if WINDOW:
        # rows see positions above these; rows of the padding see none
        floors = tl.load(row_positions + rows, mask=row_valid, other=2**30).to(tl.int32) - WINDOW
        first_key = tl.minimum(tl.maximum(tl.min(floors, 0) + 1, 0), context_len)

    first_block = first_key // BLOCK_N
    last_block = tl.cdiv(context_len + num_nodes, BLOCK_N)
    per_split = tl.cdiv(last_block - first_block, NUM_SPLITS)
    start = first_block + split * per_split
    end = tl.minimum(start + per_split, last_block)  # not above start: the split is empty
    border = tl.minimum(tl.maximum(context_len // BLOCK_N, start), end)  # blocks below have context only

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)

    for block in range(start, border):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        readable, visible = None, None
        if WINDOW:
            readable, visible = keys >= first_key, keys[None, :] > floors[:, None]
        peak, total, acc = _attend(
            q, peak, total, acc, keys, readable, visible, kv, block_table, block_stride, token_stride,
            inner_scale, outer_scale, D, D_PAD, PAGE, CAPPED,
        )  # fmt: skip

    for block in range(border, end):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        nodes = keys - context_len
        in_context, in_tree = nodes < 0, (nodes >= 0) & (nodes < num_nodes)
        mask_pointers = mask + rows[:, None] * mask_stride + nodes[None, :]
        visible = tl.load(mask_pointers, mask=row_valid[:, None] & in_tree[None, :], other=0) != 0
        visible = visible | in_context[None, :]
        if WINDOW:
            positions = tl.load(node_positions + nodes, mask=in_tree, other=0).to(tl.int32)
            positions = tl.where(in_context, keys, positions)
            visible = visible & (positions[None, :] > floors[:, None])
        readable = tl.max(visible.to(tl.int32), 0) > 0
        if tl.max(readable.to(tl.int32), 0) > 0:  # most nodes are nobody's ancestor in a large tree
            peak, total, acc = _attend(
                q, peak, total, acc, keys, readable, visible, kv, block_table, block_stride, token_stride,
                inner_scale, outer_scale, D, D_PAD, PAGE, CAPPED,
            )  # fmt: skip

    if NUM_SPLITS == 1:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # 0: a row that sees nothing
        tl.store(out + rows[:, None] * out_row_stride + heads[:, None] * out_head_stride + dims[None, :], result, valid)
    else:
        num_heads = tl.num_programs(1) * GROUP
        slots = (split * num_rows + rows) * num_heads + heads
        tl.store(stats + slots, peak, row_valid)
        tl.store(stats + NUM_SPLITS * num_rows * num_heads + slots, total, row_valid)
        if start < end:
            tl.store(partial + slots[:, None] * D + dims[None, :], acc, valid)


@triton.jit
def _combine_kernel(
    out,  # [r, H, D]
    partial,  # [NUM_SPLITS, r, H, D] fp32, unset where total is 0
    stats,  # [2, NUM_SPLITS, r, H] fp32
    num_heads,
    out_row_stride,
    out_head_stride,
    D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One (row, head) pair's softmax over all keys from that over each split, CHUNK dimensions of it."""
    pair, num_pairs = tl.program_id(0), tl.num_programs(0)
    dims = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    splits = tl.arange(0, SPLITS_PAD)
    slots = splits * num_pairs + pair
    peak = tl.load(stats + slots, mask=splits < NUM_SPLITS, other=float("-inf"))
    total = tl.load(stats + NUM_SPLITS * num_pairs + slots, mask=splits < NUM_SPLITS, other=0.0)
    top = tl.max(peak, 0)
    weights = tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top))
    inside = (total > 0.0)[:, None] & (dims < D)[None, :]
    acc = tl.load(partial + slots[:, None] * D + dims[None, :], mask=inside, other=0.0)
    whole = tl.sum(total * weights, 0)
    result = tl.sum(acc * weights[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    row, head = pair // num_heads, pair % num_heads
    tl.store(out + row * out_row_stride + head * out_head_stride + dims, result, mask=dims < D)


def is_turing(device: torch.device) -> bool:
    """Whether a block of threads has but 64 KiB of shared memory: compute capability 7.5, an RTX 20."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def paged_tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_len: torch.Tensor,
    mask: torch.Tensor,
    row_positions: torch.Tensor,
    node_positions: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sliding_window: int | None = None,
    *,
    max_keys: int,
    max_rows: int | None = None,
) -> None:
    """`tree_attention` of one request's rows, into ``out``; keys and values from the cache.

    Key p of the context_len + s lies in block ``block_table[p // B]`` at ``p % B``. Rows see the context and, of the
    nodes that follow it, those in their row of ``mask``; with a window, only positions above their own minus that.

    Args:
        query: [r, H, D] bfloat16, float16 or float32, D contiguous
        kv_cache: [num_blocks, KH, B, 2 * D], keys | values, of the same dtype; any strides, but the last is 1
        block_table: [max_blocks] int32, contiguous
        context_len: [] or [1] int32 or int64; read on the device only
        mask: [r, s] bool or uint8, rows contiguous; a row that sees nothing at all gets zeros
        row_positions: [r] int64
        node_positions: [s] int64
        out: [r, H, D], D contiguous
        scale: multiplies the scores
        soft_cap: scores become cap * tanh(score / cap) if not 0
        sliding_window: None or 0 for none
        max_keys: the most that context_len + s is expected to become: decides how finely the keys are split
        max_rows: the most rows of any such call, r if not given: calls with the same value share compiled kernels
    """
    num_rows, num_heads, head_size = query.shape
    most_rows = max(num_rows, max_rows or 0)
    kv_heads, page = kv_cache.shape[1:3]
    assert kv_cache.stride(3) == query.stride(2) == out.stride(2) == mask.stride(1) == block_table.stride(0) == 1
    group = num_heads // kv_heads
    head_pad = triton.next_power_of_2(head_size)
    row_bytes = head_pad * query.element_size()
    small = query.element_size() == 4 or is_turing(query.device)  # float32 multiplies out of registers
    tile_bytes = TILE_BYTES // 2 if small else TILE_BYTES
    block_m = max(16, min(128, 2 * tile_bytes // row_bytes, triton.next_power_of_2(most_rows * group)))
    block_n = max(16, min(64, tile_bytes // row_bytes))
    most_tiles = triton.cdiv(most_rows * group, block_m)
    splits = max(1, min(PROGRAMS // (most_tiles * kv_heads), triton.cdiv(max_keys, MIN_BLOCKS_PER_SPLIT * block_n)))
    splits = triton.next_power_of_2(splits + 1) // 2  # rounded down: few variants of the kernel
    partial = stats = None
    if splits > 1:
        partial = torch.empty((splits, num_rows, num_heads, head_size), dtype=torch.float32, device=query.device)
        stats = torch.empty((2, splits, num_rows, num_heads), dtype=torch.float32, device=query.device)
    log2e = math.log2(math.e)
    _attention_kernel[(triton.cdiv(num_rows * group, block_m), kv_heads, splits)](
        out, partial, stats, query, kv_cache, block_table, context_len, mask.view(torch.uint8),
        row_positions, node_positions, num_rows, mask.shape[1],
        2 * log2e * scale / soft_cap if soft_cap else log2e * scale, log2e * soft_cap,
        *query.stride()[:2], *out.stride()[:2], *kv_cache.stride()[:3], mask.stride(0),
        GROUP=group, D=head_size, D_PAD=head_pad, PAGE=page, WINDOW=sliding_window or 0, CAPPED=soft_cap != 0,
        NUM_SPLITS=splits, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=4 if block_m * row_bytes <= tile_bytes else 8, num_stages=NUM_STAGES,
    )  # fmt: skip
    if splits > 1:
        splits_pad = triton.next_power_of_2(splits)
        chunk = min(head_pad, COMBINE_TILE // splits_pad)
        _combine_kernel[(num_rows * num_heads, triton.cdiv(head_size, chunk))](
            out, partial, stats, num_heads, *out.stride()[:2],
            D=head_size, NUM_SPLITS=splits, SPLITS_PAD=splits_pad, CHUNK=chunk,
            num_warps=4 if splits_pad * chunk > 1024 else 1,
        )  # fmt: skip
