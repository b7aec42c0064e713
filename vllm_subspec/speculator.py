"""The draft loop: D passes of the draft model grow a tree (paper, section 4.2; step 3 of the algorithm)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from .attention.metadata import TreeMetadata
from .tree import TokenTree, grow


@dataclass
class KVGroup:
    """One KV cache group of one request during a round."""

    layer_names: list[str]
    context: torch.Tensor
    """[context_len] int64, slots of the committed tokens"""
    nodes: torch.Tensor
    """[N] int64, slots of the tree's nodes: the N that follow the context"""


def tree_metadata(
    groups: list[KVGroup], context_len: int, tree: TokenTree, rows: torch.Tensor, num_keys: int
) -> tuple[dict[str, TreeMetadata], dict[str, torch.Tensor]]:
    """Attention metadata and slot mapping, by layer name, for a pass over some nodes of a tree.

    Args:
        context_len: committed tokens
        rows: [r] int64, the nodes that the pass processes
        num_keys: nodes 0 .. num_keys - 1 have their KV once the pass has written its own
    """
    metadata, slot_mapping = {}, {}
    for group in groups:
        shared = TreeMetadata(
            context=group.context,
            nodes=group.nodes[:num_keys],
            mask=tree.ancestors[rows, :num_keys],
            row_positions=context_len + tree.depths[rows],
            node_positions=context_len + tree.depths[:num_keys],
        )
        slots = group.nodes[rows]
        for name in group.layer_names:
            metadata[name], slot_mapping[name] = shared, slots
    return metadata, slot_mapping


class SubSpecSpeculator(BaseSpeculator):
    """vLLM's speculator interface around `draft`.

    vLLM asks for drafts at the end of a step, when the next step's KV slots are not allocated yet. So `propose`
    answers with placeholders, the scheduler grants slots for a whole tree, and the runner calls `draft` at the start
    of the step that verifies it, in exactly those slots.
    """

    draft_logits = None
    supports_mm_inputs = False

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        spec = vllm_config.speculative_config
        self.vllm_config = vllm_config
        self.tree_width: int = spec.tree_width
        self.tree_depth: int = spec.tree_depth
        self.draft_temperature: float = spec.draft_temperature
        self.device = device
        self.model: torch.nn.Module | None = None  # the draft; set when the target is loaded
        self._placeholders = torch.zeros(
            vllm_config.scheduler_config.max_num_seqs, spec.num_speculative_tokens, dtype=torch.int64, device=device
        )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        pass

    def capture(self) -> None:
        pass

    def propose(self, input_batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._placeholders[: input_batch.num_reqs]

    def draft(self, root: torch.Tensor, context_len: int, groups: list[KVGroup], num_nodes: int) -> TokenTree:
        """Grow a tree of ``num_nodes`` nodes after the root, in the request's own KV slots.

        Args:
            root: [] int, the last emitted token; it is in no cache yet, so the first pass processes it
            context_len: committed tokens before the root
            groups: where the request's KV lies
            num_nodes: nodes besides the root, at most width x depth
        """
        k = self.tree_width
        levels = -(-num_nodes // k)
        tree = TokenTree.empty(1 + k * levels, self.device)
        tree.tokens[0] = root
        leaves = torch.zeros(1, dtype=torch.int64, device=self.device)
        scores = torch.zeros(1, device=self.device)
        for level in range(levels):
            first_new = 1 + k * level
            new = torch.arange(first_new, first_new + k, device=self.device)
            logits = self.forward(tree, leaves, context_len, groups, num_keys=first_new)
            scores = grow(tree, leaves, scores, logits, new, self.draft_temperature)
            leaves = new
        return tree.first(1 + num_nodes)

    def forward(
        self, tree: TokenTree, leaves: torch.Tensor, context_len: int, groups: list[KVGroup], num_keys: int
    ) -> torch.Tensor:
        """One draft pass: the draft's logits after each leaf, [r, vocabulary]."""
        metadata, slot_mapping = tree_metadata(groups, context_len, tree, leaves, num_keys)
        with set_forward_context(
            metadata, self.vllm_config, num_tokens=leaves.shape[0], slot_mapping=slot_mapping, skip_compiled=True
        ):
            hidden = self.model(input_ids=tree.tokens[leaves].int(), positions=context_len + tree.depths[leaves])
        return self.model.compute_logits(hidden)
