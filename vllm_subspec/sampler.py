"""What a step with draft rows emits: an accepted path, or one plain token."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from .tree import TokenTree, accept


def target_tokens(sampler: Sampler, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
    """[N] int64, the token that vLLM's sampler takes after each row: for greedy requests the argmax.

    On CUDA by vLLM's own kernel, so that exact ties (common in bf16) fall as they do without a tree. On CPU that
    kernel is interpreted and would crawl over a whole tree; there both take the lowest id.
    """
    if logits.device.type == "cpu":
        return logits.argmax(dim=-1)
    tokens, _ = sampler.sample(
        logits,
        batch.expanded_idx_mapping,
        batch.idx_mapping,
        batch.idx_mapping_np,
        batch.positions[batch.logits_indices],
        batch.input_ids[batch.logits_indices],
        batch.expanded_local_pos,
        batch.seq_lens_cpu_upper_bound.numpy(),
    )
    return tokens.view(-1).long()


def verify_greedy(
    tree: TokenTree, sampler: Sampler, logits: torch.Tensor, input_batch: InputBatch, max_depth: int
) -> tuple[SamplerOutput, torch.Tensor]:
    """Greedy verification of one request's tree.

    Args:
        tree: N nodes
        logits: [N, vocabulary], the target's logits after each node
        max_depth: D

    Returns:
        vLLM's sampler output for the request (accepted tokens and the bonus token), and the path that `commit` wants.
    """
    tokens = target_tokens(sampler, logits, input_batch)
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
