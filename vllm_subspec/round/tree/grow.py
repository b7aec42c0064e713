"""One level of the draft tree (paper, section 4.2; step 3 of the algorithm)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .token_tree import TokenTree


def grow(
    tree: TokenTree,
    leaves: torch.Tensor,
    scores: torch.Tensor,
    logits: torch.Tensor,
    new: torch.Tensor,
    draft_temperature: float,
    noise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Give the tree its next level: the k best continuations of all current leaves.

    A candidate's score is its parent's score + log_softmax(logits / T_d)[token]. Only device tensors are read and
    written and every shape is fixed, so that a CUDA graph can hold the whole step.

    Args:
        tree: is extended in place
        leaves: [r] int64, node ids of the current leaves
        scores: [r] float32, their scores
        logits: [r, vocabulary], the draft's logits after each leaf
        new: [k] int64, node ids that the new level takes
        draft_temperature: T_d
        noise: of a sampled request: makes of the logits those of at least k tokens with the noise of the target's
            sampler, [r, c], and the tokens, [r, c] (see `SamplingNoise`)

    Returns:
        [k] float32, the scores of the new level.
    """
    k = new.shape[0]
    candidates = None
    if noise is not None:
        logits, candidates = noise(logits)
    log_q = torch.log_softmax(logits.float() / draft_temperature, dim=-1)
    log_q, tokens = log_q.topk(k, dim=-1)  # [r, k] each
    if candidates is not None:
        tokens = candidates.gather(1, tokens)
    scores, best = (scores[:, None] + log_q).flatten().topk(k)  # the k best of r*k candidates
    parents = leaves[best // k]

    tree.tokens[new] = tokens.flatten()[best]
    tree.parents[new] = parents
    tree.depths[new] = tree.depths[parents] + 1
    tree.ancestors[new] = tree.ancestors[parents].scatter_(1, new[:, None], True)
    return scores
