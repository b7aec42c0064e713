"""Acceptance: the path of the tree that the target itself would have taken (step 4 of the algorithm)."""

from __future__ import annotations

import torch

from .token_tree import TokenTree


def accept(tree: TokenTree, target_tokens: torch.Tensor, max_depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk from the root, at each node to the child that carries the target's own token there.

    The walk is done for all nodes at once: a node is on the path if it and all its ancestors carry the token that the
    target chose at their parents. Siblings carry different tokens, so there is one such path.

    Args:
        tree: N nodes
        target_tokens: [N] int64, the token that the target emits after each node: its argmax, or its own sample
        max_depth: D, the length of the result

    Returns:
        path: [max_depth + 1] int64, ``path[d]`` is the path's node at depth d, 0 past its end. The round emits
            ``target_tokens[path[: length + 1]]``: the accepted tokens and the bonus token.
        length: [] int64, number of accepted tokens (nodes of the path without the root).
    """
    agrees = tree.tokens == target_tokens[tree.parents]
    agrees[:1].fill_(True)  # the root is already emitted; setting agrees[0] would make the host wait
    on_path = ~(tree.ancestors & ~agrees).any(dim=1)

    nodes = torch.arange(len(tree), device=tree.tokens.device)
    path = torch.zeros(max_depth + 2, dtype=torch.int64, device=tree.tokens.device)
    path.scatter_(0, torch.where(on_path, tree.depths, max_depth + 1), nodes)
    return path[: max_depth + 1], on_path.sum() - 1
