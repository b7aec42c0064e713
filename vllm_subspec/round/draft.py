"""The draft loop: D passes of the draft model grow a tree (paper, section 4.2; step 3 of the algorithm)."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.ir.op import IrOp
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from .attention.impl import warm_up
from .attention.metadata import KVGroup, TreeMetadata, tree_metadata
from .commit import move_kv
from .limits import fitting_tree, most_nodes
from .noise import SamplingNoise
from .tree import TokenTree, grow

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.states import SamplingStates

logger = init_logger("vllm.subspec.draft")

LAG = 2
"""Levels that a GPU has ahead of it while the host looks whether to go on: it never waits for the host"""
DRAFT_GRAPH_BYTES = 72 * 2**20
"""What a draft's CUDA graphs take with their pool (Qwen2.5-7B's shapes, an H200)"""
WARM_UPS = 3  # runs of a step before it is captured: kernels compile, libraries make their workspaces


class SubSpecSpeculator(BaseSpeculator):
    """vLLM's speculator interface around `draft`.

    vLLM asks for drafts at the end of a step, when the next step's KV slots are not allocated yet. So `propose`
    answers with placeholders, the scheduler grants slots for a whole tree, and the runner calls `draft` at the start
    of the step that verifies it, in exactly those slots.

    All state of a draft is in device tensors that stay where they are, so that one pass is one CUDA graph.
    """

    draft_logits = None
    supports_mm_inputs = False

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        spec = vllm_config.speculative_config
        self.vllm_config = vllm_config
        self.device = device
        self.drafted = 0
        """Nodes of the last draft, without the root"""
        self.max_nodes: int = spec.num_speculative_tokens
        self.max_keys: int = vllm_config.model_config.max_model_len
        self.model: torch.nn.Module | None = None  # the draft; set when the target is loaded
        self.groups: list[KVGroup] = []  # set when the KV cache is there
        self.noise = SamplingNoise(device)
        self.sampled = False
        """Whether the request that is drafted for samples, by `noise`"""
        self.context_len = torch.zeros((), dtype=torch.int64, device=device)
        self._placeholders = torch.zeros(
            vllm_config.scheduler_config.max_num_seqs, self.max_nodes, dtype=torch.int64, device=device
        )
        self.set_tree(
            spec.tree_width,
            spec.tree_depth,
            draft_temperature=spec.draft_temperature,
            confidence_threshold=spec.confidence_threshold,
        )

    def set_tree(
        self,
        width: int,
        depth: int,
        *,
        draft_temperature: float | None = None,
        confidence_threshold: float | None = None,
    ) -> None:
        """Draft other trees from now on; a captured step is gone. What is None stays as it is.

        A tree for which no request has room becomes the largest for which one has.

        Raises:
            ValueError: more nodes than the engine was configured for.
        """
        fitting = fitting_tree(width, depth, most_nodes(self.max_keys))
        if not 1 <= fitting[0] * fitting[1] <= self.max_nodes:
            raise ValueError(
                f"subspec: a tree of {width} x {depth} has more than the configured {self.max_nodes} nodes"
            )
        if fitting != (width, depth):
            logger.info(
                "Trees are %d x %d: a model length of %d has no room for %d x %d", *fitting, self.max_keys, width, depth
            )
            width, depth = fitting
        self.tree_width, self.tree_depth = width, depth
        if draft_temperature is not None:
            self.draft_temperature = draft_temperature
        if confidence_threshold is not None:
            self.least_score = math.log(confidence_threshold) if confidence_threshold else None
        self.graph: dict[bool, torch.cuda.CUDAGraph] | None = None  # by `sampled`
        # On the host each level has a place of its own for its best score: read late, it is still that level's.
        self._best = torch.zeros(depth, pin_memory=self.device.type == "cuda")
        self._passed = [torch.cuda.Event() for _ in range(depth)] if self.device.type == "cuda" else None
        self.tree = TokenTree.empty(1 + width * depth, self.device)
        self.leaves = torch.zeros(width, dtype=torch.int64, device=self.device)
        self.scores = torch.zeros(width, device=self.device)
        self.new = torch.zeros(width, dtype=torch.int64, device=self.device)
        # At the start all leaves are the root; only the first may have children.
        self._first_level = torch.arange(1, 1 + width, device=self.device)
        self._first_scores = torch.full((width,), float("-inf"), device=self.device)
        self._first_scores[0] = 0.0

    def propose(self, input_batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._placeholders[: input_batch.num_reqs]

    def take_slots(self, block_tables: list[torch.Tensor], slot_mappings: list[torch.Tensor], num_rows: int) -> None:
        """Take the KV slots that vLLM granted a batch of one request, for the next draft.

        Args:
            block_tables: of each group [requests, max_blocks] int32
            slot_mappings: of each group [tokens] int64, the first ``num_rows`` of them the tree's
        """
        for group, table, slots in zip(self.groups, block_tables, slot_mappings):
            group.block_table.copy_(table[0])
            group.node_slots[:num_rows] = slots[:num_rows]
            group.node_slots[num_rows:] = -1

    def set_kv_groups(self, layer_names: list[list[str]], block_table_widths: list[int]) -> None:
        """Buffers for one request's block table and node slots, per KV cache group."""
        self.graph = None  # it would write to the cache that was there before
        self.groups = [
            KVGroup(
                names,
                torch.zeros(width, dtype=torch.int32, device=self.device),
                torch.full((1 + self.max_nodes,), -1, dtype=torch.int64, device=self.device),
            )
            for names, width in zip(layer_names, block_table_widths)
        ]

    def draft(self, root: torch.Tensor, context_len: torch.Tensor, num_nodes: int) -> TokenTree:
        """Grow a tree of ``num_nodes`` nodes after the root, in the slots that `groups` names.

        Args:
            root: [] int, the last emitted token; it is in no cache yet, so the first pass processes it
            context_len: [] int, committed tokens before the root
            num_nodes: nodes besides the root, at most width x depth

        Returns:
            The tree, in buffers that the next draft overwrites. Of its nodes the first `drafted` are real: all of them,
            unless no path was likely enough to go on (``confidence_threshold``).
        """
        k = self.tree_width
        self.tree.tokens[0] = root
        self.context_len.copy_(context_len)
        self.leaves.zero_()
        self.scores.copy_(self._first_scores)
        self.new.copy_(self._first_level)
        self.drafted, levels = num_nodes, -(-num_nodes // k)
        for level in range(levels):
            if self.graph is not None:
                self.graph[self.sampled].replay()
            else:
                self.step(num_keys=1 + k * level)
            if self.least_score is not None and level + 1 < levels and self._gives_up(level):
                self.drafted = k * (level + 1)
                self.tree.discard_after(1 + self.drafted)
                break
        return self.tree.prefix(1 + num_nodes)

    def _gives_up(self, level: int) -> bool:
        """Whether no path is likely enough to go on after this level. On CUDA the level `LAG` before it decides, whose
        score is surely there: how deep a draft goes depends on tokens alone, never on who is faster."""
        self._best[level].copy_(self.scores[0], non_blocking=True)  # the best comes first
        if self._passed is not None:
            self._passed[level].record()
            level -= LAG
            if level < 0:
                return False
            self._passed[level].synchronize()
        return float(self._best[level]) < self.least_score

    def read_sampling(self, states: SamplingStates, batch: InputBatch) -> None:
        """Take the sampling parameters of a batch of one request: the next draft is for it."""
        self.sampled = bool(states.temperature.np[batch.idx_mapping_np[0]])
        if self.sampled:
            self.noise.read(states, batch.idx_mapping[:1])

    def step(self, num_keys: int) -> None:
        """One draft pass: the current leaves go through the draft, the next level comes out.

        Args:
            num_keys: nodes 0 .. num_keys - 1 may have KV; more than there are costs time only
        """
        positions = self.context_len + self.tree.depths[self.leaves]
        logits = self.forward(self.tree.prefix(num_keys), positions)
        noise = partial(self.noise.add, positions=positions) if self.sampled else None
        scores = grow(self.tree, self.leaves, self.scores, logits, self.new, self.draft_temperature, noise)
        self.scores.copy_(scores)
        self.leaves.copy_(self.new)
        self.new += self.tree_width

    def forward(self, keys: TokenTree, positions: torch.Tensor) -> torch.Tensor:
        """The draft's logits after each leaf, [k, vocabulary]; its KV goes to the leaves' slots.

        Args:
            positions: [k] int64, of the leaves
        """
        slot_mapping = {}
        for group in self.groups:
            slot_mapping.update(dict.fromkeys(group.layer_names, group.node_slots[self.leaves]))
        context = set_forward_context(
            tree_metadata(self.groups, self.context_len, keys, self.leaves, self.max_keys, self.tree_width),
            self.vllm_config,
            num_tokens=self.tree_width,
            slot_mapping=slot_mapping,
            skip_compiled=True,
        )
        with context, self._own_kernels():
            hidden = self.model(input_ids=self.tree.tokens[self.leaves].int(), positions=positions)
            return self.model.compute_logits(hidden)

    def _own_kernels(self) -> ExitStack:
        """On CUDA, vLLM's fused kernels for what the compiled target leaves to its compiler."""
        stack = ExitStack()
        if self.device.type == "cuda":
            for op in IrOp.registry.values():
                if "vllm_c" in op.supported_providers():
                    stack.enter_context(op.set_priority(["vllm_c", "native"]))
        return stack

    def verification_metadata(self, tree: TokenTree) -> dict[str, TreeMetadata]:
        """Attention metadata, by layer name, for the target's pass over all nodes of the last drafted tree."""
        return tree_metadata(self.groups, self.context_len, tree, slice(None), self.max_keys, len(self.tree))

    # --- CUDA graph

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        pass

    def capture(self) -> None:
        """Capture one draft step of both kinds, and compile what verification needs. The KV cache must be in place."""
        started = time.perf_counter()
        for group in self.groups:
            group.block_table.zero_()  # block 0 belongs to no request
            group.node_slots.fill_(-1)
        self.draft(self.tree.tokens[0], self.context_len.zero_(), num_nodes=0)
        sampled = self._captured_step(sampled=True)  # greedy last: what `draft` is for unless told
        self.graph = {True: sampled, False: self._captured_step(sampled=False, pool=sampled.pool())}
        context = self.vllm_config.compilation_config.static_forward_context
        metadata = self.verification_metadata(self.tree)
        warm_up([context[name] for name in metadata], metadata)
        nowhere = torch.zeros(1 + self.tree_depth, dtype=torch.int64, device=self.device)
        for group in self.groups:  # a path of no steps: nothing moves
            caches = [context[name].kv_cache for name in group.layer_names]
            move_kv(caches, group.block_table, self.context_len, nowhere, nowhere[0].int())
        logger.info("Captured the draft step, width %d, in %.1f s", self.tree_width, time.perf_counter() - started)

    def _captured_step(self, sampled: bool, pool: Any = None) -> torch.cuda.CUDAGraph:
        """One draft step for a greedy or a sampled request. Steps that share a memory pool never run side by side."""
        self.sampled = sampled
        for _ in range(WARM_UPS):
            self.step(len(self.tree))
            self.new.copy_(self._first_level)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.step(len(self.tree))
        return graph
