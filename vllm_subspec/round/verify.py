"""What a step with draft rows emits: an accepted path of the tree, or one plain token.

Every token comes out of vLLM's own sampler, whatever the request asks for (temperature, top-k, top-p, min-p, bias,
penalties, bad words, logprobs, custom processors); vLLM's noise depends on seed and position only, so it is the token
that a plain step would have emitted there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from ..patching import replaced
from .tree import TokenTree, accept

ROWS_AT_ONCE = 64
"""Rows of processed logits in memory at a time: float32 copies of a whole large tree would take hundreds of MiB."""
BUILT_IN = (LogitBiasState, PenaltiesState, BadWordsState)
"""vLLM's own logits processors, which take rows in any layout."""


def verify_greedy(tree: TokenTree, tokens: torch.Tensor, max_depth: int) -> tuple[SamplerOutput, torch.Tensor]:
    """Verification of one request that takes the argmax of the target's own logits, whatever came before.

    Args:
        tree: N nodes
        tokens: [N] int64, the target's choice after each node
        max_depth: D

    Returns:
        vLLM's sampler output for the request (accepted tokens and the bonus token), and the path that the commit wants.
    """
    path, length = accept(tree, tokens, max_depth)
    num_sampled = (length + 1).int().view(1)
    output = SamplerOutput(
        sampled_token_ids=tokens[path].view(1, -1),
        logprobs_tensors=None,
        num_nans=None,
        num_sampled=num_sampled,
        num_rejected=len(tree) - num_sampled,
    )
    return output, path


def verify_sampled(
    tree: TokenTree,
    sampler: Sampler,
    logits: torch.Tensor,
    batch: InputBatch,
    max_depth: int,
    levels: int,
    find_path: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> tuple[SamplerOutput, torch.Tensor]:
    """Verification of any other request.

    First the likely path: at each node the token that the sampler takes there, as if only committed tokens came
    before it. That is exact unless the tokens before count (penalties, bad words) or a processor of the user's own is at
    work. Then vLLM's sampler goes over this path as over a chain of drafts, where it knows what came before each row:
    once, in vLLM's own layout. Its word holds, as far as it agrees.

    Args:
        logits: [N, vocabulary], the target's logits after each node
        levels: of this tree, D at most
        find_path: see `likely_path`

    Returns:
        As `verify_greedy`.
    """
    path, likely = find_path(tree, sampler, logits, batch, max_depth)
    chain = path[: levels + 1]
    output = sampler(logits[chain], as_chain(batch, chain))
    tokens = output.sampled_token_ids.view(-1)
    steps = torch.arange(1, chain.shape[0], device=path.device)
    agrees = (tokens[:-1] == tree.tokens[chain[1:]]) & (steps <= likely)
    output.sampled_token_ids = tokens.view(1, -1)
    output.num_sampled = (agrees.cumprod(0).sum() + 1).int().view(1)
    output.num_rejected = len(tree) - output.num_sampled
    return output, path


def likely_path(
    tree: TokenTree, sampler: Sampler, logits: torch.Tensor, batch: InputBatch, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Path and length as of `accept`, of the tokens that `sample_rows` takes."""
    return accept(tree, sample_rows(sampler, logits, batch), max_depth)


def sample_rows(
    sampler: Sampler, logits: torch.Tensor, batch: InputBatch, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """[r] int64, the token that vLLM's sampler takes after each of the given tree rows (default: all).

    Each row is taken for the first of its request: tokens between the root and the row are not seen. vLLM promises
    processors of the user's own another layout and one call a step: they are left out here.
    """
    if rows is None:
        rows = torch.arange(logits.shape[0], device=logits.device)
    built_in = [processor for processor in sampler.logits_processors if isinstance(processor, BUILT_IN)]
    with replaced(sampler, "logits_processors", built_in):
        tokens = [
            sampler.sample(
                logits[part],
                batch.expanded_idx_mapping[part],
                batch.idx_mapping,
                batch.idx_mapping_np,
                batch.positions[part],
                batch.input_ids[part],
                torch.zeros_like(batch.expanded_local_pos[part]),
                batch.seq_lens_cpu_upper_bound.numpy(),
            )[0].view(-1)
            for part in rows.split(ROWS_AT_ONCE)
        ]
    return torch.cat(tokens).long()


def as_chain(batch: InputBatch, path: torch.Tensor) -> InputBatch:
    """The batch of one request's tree as if it held a chain of drafts: the tokens of ``path``, one position after the
    other. Rows past the path's end, which no word of the sampler is taken for, have the root's token."""
    length = path.shape[0]
    steps = torch.arange(length, device=path.device)
    return replace(
        batch,
        input_ids=batch.input_ids[path],
        positions=batch.positions[0] + steps,
        logits_indices=steps,
        expanded_idx_mapping=batch.expanded_idx_mapping[:1].expand(length).contiguous(),
        expanded_local_pos=steps.to(batch.expanded_local_pos.dtype),
        cu_num_logits=torch.arange(2, dtype=torch.int32, device=path.device) * length,
        cu_num_logits_np=np.array([0, length], dtype=np.int32),
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound - batch.num_draft_tokens + length - 1,
    )


def sample_roots(sampler: Sampler, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
    """Sample one token a request as if no draft rows were there: each request's first logits row is its root's.

    For steps whose drafts are placeholders. Draft rows come after the root, so they cannot have changed its logits.
    """
    first = input_batch.cu_num_logits[:-1].long()
    num_reqs = input_batch.num_reqs
    roots = replace(
        input_batch,
        logits_indices=input_batch.logits_indices[first],
        expanded_idx_mapping=input_batch.idx_mapping,
        expanded_local_pos=torch.zeros_like(input_batch.expanded_local_pos[:num_reqs]),
        cu_num_logits=torch.arange(num_reqs + 1, dtype=torch.int32, device=logits.device),
        cu_num_logits_np=range(num_reqs + 1),
        num_draft_tokens=0,
        num_draft_tokens_per_req=None,
    )
    output = sampler(logits[first], roots)
    drafts = torch.from_numpy(input_batch.num_draft_tokens_per_req).to(output.num_rejected)
    output.num_rejected = drafts.where(output.num_sampled > 0, 0)
    return output
