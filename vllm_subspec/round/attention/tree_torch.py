"""Tree attention in plain torch: the reference for the kernels, and the path on CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
