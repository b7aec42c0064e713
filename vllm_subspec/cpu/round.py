"""A round's steps on CPU, where the sampler's kernels are interpreted and would crawl over a whole tree."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.sampler import Sampler

from ..round.round import Operations
from ..round.tree import TokenTree
from ..round.verify import sample_rows
from .kv import commit


def greedy_tokens(sampler: Sampler, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
    """As `sample_rows` of a greedy request: both take the lowest id of exact ties here."""
    return logits.argmax(dim=-1)


def likely_path(
    tree: TokenTree, sampler: Sampler, logits: torch.Tensor, batch: InputBatch, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `vllm_subspec.round.verify.likely_path`; only the nodes on the way are sampled."""
    path = torch.zeros(max_depth + 1, dtype=torch.int64)
    length = 0
    while True:
        node = path[length]
        token = sample_rows(sampler, logits, batch, node.view(1))
        children = (tree.parents == node) & (tree.tokens == token)
        children[0] = False  # the root is its own parent
        if not children.any():
            return path, torch.tensor(length)
        length += 1
        path[length] = children.nonzero()[0, 0]


OPERATIONS = Operations(greedy_tokens, likely_path, commit)
