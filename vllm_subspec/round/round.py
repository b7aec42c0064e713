"""One round: draft a tree, verify it in the target's pass, commit the accepted path (paper, section 4).

`Round` reads from top to bottom as the algorithm does. vLLM runs the target's pass between `metadata` and `verify`, so its
runner calls the steps one by one (see `vllm_subspec.engine.runner`); what they share lies here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .commit import commit
from .tree import TokenTree
from .verify import likely_path, sample_rows, verify_greedy, verify_sampled

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from .attention.metadata import TreeMetadata
    from .draft import SubSpecSpeculator


@dataclass(frozen=True)
class Operations:
    """What a round does by other means where Triton's kernels are interpreted (see `vllm_subspec.cpu.round`)."""

    greedy_tokens: Callable[..., torch.Tensor] = sample_rows
    likely_path: Callable[..., tuple[torch.Tensor, torch.Tensor]] = likely_path
    commit: Callable[..., None] = commit


class Round:
    """One request's round, made when the KV slots of its step are known."""

    def __init__(
        self,
        speculator: SubSpecSpeculator,
        operations: Operations,
        sampler: Sampler,
        batch: InputBatch,
        block_tables: list[torch.Tensor],
        slot_mappings: list[torch.Tensor],
        greedy: bool,
    ):
        """
        Args:
            speculator: drafts
            batch: vLLM's, of this request alone: the root's row and as many draft rows as the scheduler granted
            block_tables, slot_mappings: vLLM's for the batch, by KV cache group (see `SubSpecSpeculator.take_slots`)
            greedy: whether the request takes the argmax of the target's own logits, whatever came before
        """
        self.speculator, self.operations, self.sampler, self.greedy = speculator, operations, sampler, greedy
        self.context_len = speculator.context_len
        """[] int64, committed tokens before the root"""
        speculator.take_slots(block_tables, slot_mappings, 1 + batch.num_draft_tokens)

    # 1. Draft: at most D passes of the draft model, in the slots that this step was granted.

    def draft(self, batch: InputBatch) -> None:
        """Draft the tree and write it into the batch's rows: node i has slot context + i, position context + depth."""
        self.speculator.read_sampling(self.sampler.sampling_states, batch)
        tree = self.speculator.draft(batch.input_ids[0], batch.positions[0], batch.num_draft_tokens)
        batch.input_ids[: len(tree)] = tree.tokens.clamp(min=0).to(batch.input_ids.dtype)
        batch.positions[: len(tree)] = self.context_len + tree.depths
        self.tree: TokenTree = tree

    # 2. The target's pass over all nodes is vLLM's own. Its attention layers see the tree by this.

    def metadata(self) -> dict[str, TreeMetadata]:
        """Attention metadata, by layer name: each node sees the context and its ancestors."""
        return self.speculator.verification_metadata(self.tree)

    # 3. Verify: walk from the root, following the child that carries the target's own choice.

    def verify(self, logits: torch.Tensor, batch: InputBatch) -> SamplerOutput:
        """What the request emits: the accepted tokens and the bonus token.

        Args:
            logits: [N, vocabulary], the target's after each node; the sampler may write into them
        """
        max_depth = self.speculator.tree_depth
        if self.greedy:
            tokens = self.operations.greedy_tokens(self.sampler, logits, batch)
            self.output, self.path = verify_greedy(self.tree, tokens, max_depth)
        else:
            levels = -(-(len(self.tree) - 1) // self.speculator.tree_width)
            self.output, self.path = verify_sampled(
                self.tree, self.sampler, logits, batch, max_depth, levels, self.operations.likely_path
            )
        return self.output

    # 4. Commit: the accepted path's KV moves to consecutive slots.

    def commit(self, cache_owners: list[list[Any]]) -> None:
        """
        Args:
            cache_owners: of each of the speculator's groups, vLLM's Attention layers that own a cache
        """
        accepted = self.output.num_sampled[0] - 1
        for layers, group in zip(cache_owners, self.speculator.groups):
            if layers:
                self.operations.commit(layers, group.block_table, self.context_len, self.path, accepted)

    # What it did, for whoever counts.

    @property
    def size(self) -> int:
        """Nodes drafted, root included."""
        return 1 + self.speculator.drafted
