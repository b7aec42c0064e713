"""What a step with draft rows emits: an accepted path, or one plain token."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from .tree import TokenTree, accept


def verify_greedy(tree: TokenTree, logits: torch.Tensor, max_depth: int) -> tuple[SamplerOutput, torch.Tensor]:
    """Greedy verification of one request's tree.

    Args:
        tree: N nodes
        logits: [N, vocabulary], the target's logits after each node
        max_depth: D

    Returns:
        vLLM's sampler output for the request (accepted tokens and the bonus token), and the path that `commit` wants.
    """
    target_tokens = logits.argmax(dim=-1)
    path, length = accept(tree, target_tokens, max_depth)
    num_sampled = (length + 1).int().view(1)
    output = SamplerOutput(
        sampled_token_ids=target_tokens[path].view(1, -1),
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
