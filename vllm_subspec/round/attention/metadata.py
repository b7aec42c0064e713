"""What an attention layer needs to know about a batch of tree rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..tree import TokenTree


@dataclass
class KVGroup:
    """One of vLLM's KV cache groups, as far as the request under way is concerned. Filled anew each round."""

    layer_names: list[str]
    block_table: torch.Tensor
    """[max_blocks] int32"""
    node_slots: torch.Tensor
    """[nodes of the largest tree] int64, the slot of each tree node, -1 where the request was granted none"""


@dataclass
class TreeMetadata:
    """Attention metadata of r rows, each a node of one request's tree, for the layers of one KV cache group.

    Keys lie at logical positions 0 .. context_len + s - 1 of the request: its committed tokens, then s tree nodes.
    A row sees the whole context and the nodes in its row of `mask`; a layer with a sliding window w sees of these
    only keys whose rotary position is above the row's own minus w.
    """

    block_table: torch.Tensor
    """[max_blocks] int32"""
    context_len: torch.Tensor
    """[] int64"""
    mask: torch.Tensor
    """[r, s] bool"""
    row_positions: torch.Tensor
    """[r] int64, rotary positions"""
    node_positions: torch.Tensor
    """[s] int64, rotary positions"""
    max_keys: int
    """context_len + s never exceeds this"""
    max_rows: int
    """r of the largest pass of this kind"""
    cache: dict = field(default_factory=dict)
    """Of what attention layers of the group derive from this and share"""


def tree_metadata(
    groups: list[KVGroup],
    context_len: torch.Tensor,
    tree: TokenTree,
    rows: torch.Tensor | slice,
    max_keys: int,
    max_rows: int,
) -> dict[str, TreeMetadata]:
    """Attention metadata, by layer name, for a pass over some nodes of a tree.

    Args:
        context_len: [] int64, committed tokens
        tree: its s nodes are the keys besides the context; nodes without KV are no ancestors of any row
        rows: the nodes that the pass processes
    """
    positions = context_len + tree.depths
    metadata = {}
    for group in groups:
        shared = TreeMetadata(
            group.block_table, context_len, tree.ancestors[rows], positions[rows], positions, max_keys, max_rows
        )
        metadata.update(dict.fromkeys(group.layer_names, shared))
    return metadata
