"""Tree attention in plain torch: the path on CPU, and the reference for the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..round.attention.impl import TreeAttention
from ..round.attention.metadata import TreeMetadata
from .kv import read_slots, slots_at


class CPUTreeAttention(TreeAttention):
    """`TreeAttention` by torch."""

    def attend(self, layer, query, kv_cache, meta: TreeMetadata, out, soft_cap: float) -> None:
        keys, values = read_slots(layer, key_slots(meta, kv_cache.shape[2]))
        out.copy_(tree_attention(query, keys, values, visible_keys(meta, layer.sliding_window), self.scale, soft_cap))


def key_slots(meta: TreeMetadata, block_size: int) -> torch.Tensor:
    """[context_len + s] int64, slots of all keys."""
    if block_size not in meta.cache:
        positions = torch.arange(int(meta.context_len) + meta.mask.shape[1])
        meta.cache[block_size] = slots_at(meta.block_table, positions, block_size)
    return meta.cache[block_size]


def visible_keys(meta: TreeMetadata, sliding_window: int | None) -> torch.Tensor:
    """[r, context_len + s] bool, the keys that each row sees."""
    key = ("visible", sliding_window)
    if key not in meta.cache:
        context_len = int(meta.context_len)
        seen = torch.cat([meta.mask.new_ones(meta.mask.shape[0], context_len), meta.mask], dim=1)
        if sliding_window is not None:
            positions = torch.cat([torch.arange(context_len), meta.node_positions])
            seen &= positions[None, :] > meta.row_positions[:, None] - sliding_window
        meta.cache[key] = seen
    return meta.cache[key]


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """softmax(cap(q k^T * scale) where visible) v, with grouped heads.

    Args:
        query: [r, num_heads, head_size]
        keys: [s, num_kv_heads, head_size]
        values: [s, num_kv_heads, head_size_v]
        visible: [r, s] bool, which keys each row sees; at least one a row
        scale: multiplies the scores
        soft_cap: scores become cap * tanh(score / cap) if not 0 (Gemma 2)

    Returns:
        [r, num_heads, head_size_v]
    """
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (query, keys, values))  # [1, heads, rows, size]
    if not soft_cap:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    else:
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        scores = soft_cap * torch.tanh(q @ k.transpose(2, 3) * (scale / soft_cap))
        out = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v
    return out[0].transpose(0, 1)
