"""What an attention layer needs to know about a batch of tree rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class TreeMetadata:
    """Attention metadata of r rows, each a node of one request's tree, for the layers of one KV cache group.

    A row sees the whole context and, of the tree's s nodes that have KV, those in its row of `mask`; a layer with a
    sliding window w sees of these only positions above its own minus w.
    """

    context: torch.Tensor
    """[context_len] int64, slots of the request's committed tokens"""
    nodes: torch.Tensor
    """[s] int64, slots of the tree's nodes"""
    mask: torch.Tensor
    """[r, s] bool"""
    row_positions: torch.Tensor
    """[r] int64"""
    node_positions: torch.Tensor
    """[s] int64"""
    _visible: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @property
    def slots(self) -> torch.Tensor:
        """[context_len + s] int64, slots of all keys"""
        return torch.cat([self.context, self.nodes])

    def visible(self, sliding_window: int | None) -> torch.Tensor:
        """[r, context_len + s] bool, the keys that each row sees in a layer with that window."""
        if sliding_window not in self._visible:
            context_len = self.context.shape[0]
            seen = torch.cat([self.mask.new_ones(self.mask.shape[0], context_len), self.mask], dim=1)
            if sliding_window is not None:
                context_positions = torch.arange(context_len, device=self.mask.device)
                positions = torch.cat([context_positions, self.node_positions])
                seen &= positions[None, :] > self.row_positions[:, None] - sliding_window
            self._visible[sliding_window] = seen
        return self._visible[sliding_window]
