"""Memory for the masks of grammars: one a request, since requests with a grammar never get a tree.

vLLM has room for a mask after every draft of every request: with a tree of 288 nodes, 256 requests and a vocabulary of
152k, 1.4 GB on the GPU and as much in CPU memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.structured_output import StructuredOutputManager


def one_mask_a_request(max_num_logits: int, mask_stride: int, **kwargs: Any) -> Any:
    """vLLM's StructuredOutputsWorker, with a mask a request in GPU memory.

    Args:
        max_num_logits: requests x ``mask_stride``
        mask_stride: rows of a request in the largest step
    """
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    return StructuredOutputsWorker(max_num_logits=max_num_logits // mask_stride, mask_stride=mask_stride, **kwargs)


def allocate_masks(manager: StructuredOutputManager) -> None:
    """Room for a mask a request in CPU memory, before vLLM's manager makes its own at the first mask."""
    if manager._grammar_bitmask is None and manager.backend is not None:
        requests = manager.vllm_config.scheduler_config.max_num_seqs
        manager._grammar_bitmask = manager.backend.allocate_token_bitmask(requests)
