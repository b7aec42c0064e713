"""Torch versions of the vLLM kernels that Triton's interpreter rejects. For CPU workers only."""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu.input_batch import InputBatch


def use_torch_top_k_top_p() -> None:
    """vLLM has a torch path of its own, for where there is no Triton."""
    topk_topp_sampler.HAS_TRITON = False


class GrammarWorker:
    """Stands in for vLLM's StructuredOutputsWorker."""

    @staticmethod
    def apply_grammar_bitmask(
        logits: torch.Tensor, input_batch: InputBatch, grammar_req_ids: list[str], grammar_bitmask: np.ndarray
    ) -> None:
        """Set the logits of tokens that the grammars forbid to -inf, in place.

        Args:
            logits: [rows, vocabulary]
            grammar_req_ids: requests with a grammar; each has its logits rows' masks in `grammar_bitmask`, in order
            grammar_bitmask: [masks, vocabulary / 32] int32, bit set: allowed
        """
        bounds = input_batch.cu_num_logits_np
        rows = [
            row
            for index in map(input_batch.req_ids.index, grammar_req_ids)
            for row in range(int(bounds[index]), int(bounds[index + 1]))
        ]
        bits = torch.from_numpy(grammar_bitmask)[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1
        forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
        logits[rows] = logits[rows].masked_fill(forbidden, float("-inf"))
