"""The token tree of one round, as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_TOKEN = -1


@dataclass
class TokenTree:
    """N nodes in the order they were drafted; node 0 is the root, the last emitted token.

    A parent always precedes its children, so the first n nodes of a tree are a tree as well.
    Node i writes its KV to slot ``context + i`` and has position ``context + depth(i)``.
    """

    tokens: torch.Tensor
    """[N] int64; `NO_TOKEN` where a draft ended early (see `discard_after`)"""
    parents: torch.Tensor
    """[N] int64; the root's is 0"""
    depths: torch.Tensor
    """[N] int64; the root's is 0"""
    ancestors: torch.Tensor
    """[N, N] bool; row i marks the nodes that i attends to: its ancestors and itself"""

    @classmethod
    def empty(cls, num_nodes: int, device: torch.device | str = "cpu") -> TokenTree:
        """A tree of a root with token 0 and room for ``num_nodes - 1`` more nodes."""
        ints = lambda: torch.zeros(num_nodes, dtype=torch.int64, device=device)  # noqa: E731
        tree = cls(ints(), ints(), ints(), torch.zeros(num_nodes, num_nodes, dtype=torch.bool, device=device))
        tree.ancestors[0, 0] = True
        return tree

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def discard_after(self, n: int) -> None:
        """Keep the first ``n`` nodes. The others' rows become nodes that see themselves alone and no target accepts."""
        self.tokens[n:].fill_(NO_TOKEN)
        self.parents[n:].zero_()
        self.depths[n:].zero_()
        self.ancestors[n:].zero_()
        self.ancestors.diagonal()[n:].fill_(True)

    def prefix(self, n: int) -> TokenTree:
        """The tree of the first ``n`` nodes, sharing storage with this one."""
        return TokenTree(self.tokens[:n], self.parents[:n], self.depths[:n], self.ancestors[:n, :n])
