"""vLLM's model runner with four seams: load the draft, draft before a pass, verify after it, ask for the next tree."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.model_executor.model_loader import base_loader
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu import model_runner as vllm_runner
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from ..patching import replaced
from ..round.attention.impl import TreeAttention, install
from ..round.draft import DRAFT_GRAPH_BYTES, SubSpecSpeculator
from ..round.limits import LEAVE_OUT
from ..round.round import Operations, Round
from ..round.verify import ROWS_AT_ONCE, sample_roots
from ..weights.draft import make_draft
from ..weights.substitute import make_substitutes
from ..weights.uva import copy_before_use
from .grammar import one_mask_a_request
from .offloading import report_offloading
from .stats import Rounds

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.subspec")


def make_runner(runner_cls: type, vllm_config: VllmConfig, device: torch.device) -> Any:
    """An instance of ``runner_cls`` (vLLM's runner with `SubSpecRunner` before it), given our speculator."""
    make = lambda vllm_config, device, req_states: runner_cls.speculator_cls(vllm_config, device)  # noqa: E731
    with replaced(vllm_runner, "init_speculator", make):
        return runner_cls(vllm_config, device)


def _say_plain(requests: str) -> None:
    """Log that such requests are served without trees, the first time that there are any."""
    logger.info_once("subspec: %s run without speculation, by plain steps", requests)


class Verifier:
    """Stands where vLLM has its RejectionSampler: called for every step with draft rows."""

    enable_adaptive_verification = False

    def __init__(self, verify):
        self.verify = verify

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch, draft_logits=None, invalid_drafts=None):
        return self.verify(logits, input_batch)


MAX_FAILURES = 3
"""Trees in a row that may fail: each costs a pass over all its rows"""


class SubSpecRunner:
    """Mixed in before vLLM's GPUModelRunner (Model Runner V2)."""

    speculator_cls: type[SubSpecSpeculator] = SubSpecSpeculator
    operations = Operations()
    tree_attention: type[TreeAttention] = TreeAttention

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self.rounds = Rounds(device)
        self.round: Round | None = None  # of the step under way
        self.tree_requests: dict[str, int | None] = {}  # request id -> its max_tokens, where a tree may be drafted
        self.argmax_requests: set[str] = set()  # those of them that take the argmax of the target's own logits
        self.drafted_levels = 0  # in that round
        self._marks: list[Any] = []  # start of the step, end of its draft
        self._failures, self._round_failed, self._warned = 0, False, False  # in a row; in this step; ever

    # --- load: the target as vLLM loads it, and the draft around its modules

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        substitutes: dict[str, torch.nn.Module] = {}
        process_weights = base_loader.process_weights_after_loading

        def substitute_then_process(model, model_config, target_device):
            # vLLM's kernels repack weights in place and some drop the original, so substitutes are made before.
            started = time.perf_counter()
            substitutes.update(make_substitutes(model, self.speculative_config, self.device))
            report_offloading(model, substitutes, self.vllm_config, time.perf_counter() - started)
            process_weights(model, model_config, target_device)

        with (
            replaced(base_loader, "process_weights_after_loading", substitute_then_process),
            replaced(vllm_runner, "StructuredOutputsWorker", one_mask_a_request),
        ):
            super().load_model(*args, **kwargs)
        if type(self.model_state) is not DefaultModelState:
            raise NotImplementedError(
                f"subspec: {type(self.model).__name__} makes inputs or samples in a way of its own "
                f"({type(self.model_state).__name__}), which does not know trees; {LEAVE_OUT}"
            )
        if not substitutes:
            raise ValueError(
                "subspec: the model has no linear layers that a substitute could stand in for; " + LEAVE_OUT
            )
        copy_before_use(self.model)
        self._make_draft(substitutes)
        self.model_state.prepare_attn = self._with_tree_metadata(self.model_state.prepare_attn)
        self.rejection_sampler = Verifier(self._verify)
        self.speculator.noise.attach(self.sampler)

    def _make_draft(self, substitutes: dict[str, torch.nn.Module]) -> None:
        self.speculator.model = make_draft(self.model, substitutes, self.device)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """vLLM's memory profile of sampling, with the logits of a whole tree: KV cache must not take their place."""
        super()._dummy_sampler_run(hidden_states)
        logits = self.model.compute_logits(hidden_states[:1].repeat(1 + self.speculator.max_nodes, 1))
        logits[:ROWS_AT_ONCE].float().clone()

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        context = self.compilation_config.static_forward_context
        layers = [{name: context[name] for name in group.layer_names} for group in self.kv_cache_config.kv_cache_groups]
        for group in layers:
            install(group, self.tree_attention)
        self.speculator.set_kv_groups(
            [list(group) for group in layers], [table.shape[1] for table in self.block_tables.input_block_tables]
        )
        # A layer that shares another's cache has none of its own to compact.
        self.cache_owners = [
            [layer for layer in group.values() if layer.kv_sharing_target_layer_name is None] for group in layers
        ]

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture vLLM's graphs, if it has any here, and the draft's; bytes that they take. While vLLM profiles, the
        draft's are estimated: capturing them once more would take seconds."""
        if profile_only:
            with replaced(self.speculator, "capture", lambda: None):
                return super().capture_model(profile_only=True) + DRAFT_GRAPH_BYTES
        if self.cudagraph_manager.needs_capture():
            return super().capture_model()
        free = torch.accelerator.get_memory_info()[0]
        self.speculator.capture()
        return free - torch.accelerator.get_memory_info()[0]

    def set_tree(self, width: int, depth: int, **options: float) -> None:
        captured = self.speculator.graph is not None
        self.speculator.set_tree(width, depth, **options)
        if captured:
            self.speculator.capture()

    # --- draft: between vLLM's slot mapping and its forward pass

    def prepare_attn(self, input_batch: InputBatch):
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        started = self.rounds.mark()
        self.round = self._begin_round(input_batch, block_tables, slot_mappings)
        if self.round is None and input_batch.num_draft_tokens:
            input_batch.input_ids.clamp_(min=0)  # vLLM marks drafts that it did not want by -1, which is no token
        self._marks = [started, self.rounds.mark()]
        return block_tables, slot_mappings

    def _begin_round(self, batch: InputBatch, block_tables, slot_mappings) -> Round | None:
        """The round of this step, its tree drafted and written into the batch, if the step is made for one."""
        if not self._is_for_a_tree(batch):
            return None
        try:
            greedy = batch.req_ids[0] in self.argmax_requests
            begun = Round(self.speculator, self.operations, self.sampler, batch, block_tables, slot_mappings, greedy)
            begun.draft(batch)
            return begun
        except Exception:
            self._failed("Drafting a tree")
            return None

    def _is_for_a_tree(self, batch: InputBatch) -> bool:
        return (
            0 < batch.num_draft_tokens <= self.speculator.tree_width * self.speculator.tree_depth  # see `set_tree`
            and batch.num_reqs == 1
            and batch.num_tokens == 1 + batch.num_draft_tokens
            and not batch.has_prefill
            and batch.req_ids[0] in self.tree_requests
        )

    def _with_tree_metadata(self, prepare_attn):
        """vLLM's metadata, with the attention layers' own exchanged when the step verifies a tree."""

        def prepare(input_batch: InputBatch, *args: Any, **kwargs: Any) -> dict[str, Any]:
            metadata = prepare_attn(input_batch, *args, **kwargs)
            if self.round is not None:
                metadata.update(self.round.metadata())
            return metadata

        return prepare

    # --- verify and commit: instead of vLLM's rejection sampler

    def _verify(self, logits: torch.Tensor, input_batch: InputBatch):
        if self.round is not None:
            try:
                output = self.round.verify(logits, input_batch)
                self.round.commit(self.cache_owners)
                self._failures = 0
                return output
            except Exception:
                self._failed("Verifying a tree")
                self.round = None
        return sample_roots(self.sampler, logits, input_batch)

    def _failed(self, what: str) -> None:
        """Count the exception under way, and log the first. After `MAX_FAILURES` in a row no trees are asked for."""
        if not self._warned:
            logger.exception("subspec: %s failed; the request goes on by plain decoding", what)
        self._warned = self._round_failed = True
        self._failures += 1
        if self._failures == MAX_FAILURES:
            logger.warning(
                "subspec: %s failed, and so did the %d trees before it: this engine goes on by plain decoding, without "
                "speculation, until it is started again. The first failure is logged above",
                what, MAX_FAILURES - 1,
            )  # fmt: skip

    def sample(self, hidden_states, input_batch: InputBatch, grammar_output):
        sampled = super().sample(hidden_states, input_batch, grammar_output)
        size, accepted = (self.round.size, sampled[1][0] - 1) if self.round is not None else (1, 0)
        marks = [*self._marks, self.rounds.mark()]
        self.rounds.add(input_batch.req_ids[0], size, accepted, marks, self._round_failed)
        self.drafted_levels = -(-(size - 1) // self.speculator.tree_width)
        self.round, self._round_failed = None, False
        return sampled

    def sample_tokens(self, grammar_output):
        output = super().sample_tokens(grammar_output)
        if output is not None:  # None: the step failed before
            output.model_runner_output.drafted_levels = self.drafted_levels  # for the scheduler's counters
        return output

    # --- ask: how many draft rows each request wants in the next step

    def add_requests(self, scheduler_output) -> None:
        super().add_requests(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            params = new.sampling_params
            if params is None:
                continue
            if params.structured_outputs is not None:
                _say_plain("Requests with structured output (a required tool call is one)")
                continue
            if not self._may_verify_chains():
                _say_plain("Requests of an engine that returns sampling masks")
                continue
            self.tree_requests[new.req_id] = params.max_tokens
            index = self.req_states.req_id_to_index[new.req_id]
            if (
                params.temperature == 0.0
                and not self.sampler.needs_logits_processing[index]
                and self.sampler.get_logprobs_dims(np.array([index])) is None
            ):
                self.argmax_requests.add(new.req_id)

    def _may_verify_chains(self) -> bool:
        """Whether vLLM's sampler can go over several tokens of one request: its masks are of one only."""
        return not self.sampler.return_sampling_mask

    def _remove_request(self, req_id: str) -> bool:
        self.tree_requests.pop(req_id, None)
        self.argmax_requests.discard(req_id)
        return super()._remove_request(req_id)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        proposed = super().take_draft_token_ids()
        if proposed is None:
            return None
        if len(proposed.req_ids) > 1:
            _say_plain("Several requests at once (n > 1 and beam search make several of one)")
        counts = [self._tree_size(req_id) if len(proposed.req_ids) == 1 else 0 for req_id in proposed.req_ids]
        return DraftTokenIds(proposed.req_ids, [[-1] * count for count in counts])

    def _tree_size(self, req_id: str) -> int:
        """Nodes worth drafting next: no deeper than the tokens that the request may still emit.

        The step is over and its output was read, so reading the token count waits for nothing.
        """
        if self._failures >= MAX_FAILURES or req_id not in self.tree_requests:
            return 0
        if req_id not in self.req_states.req_id_to_index:
            return 0
        index = self.req_states.req_id_to_index[req_id]
        emitted = int(self.req_states.num_computed_tokens.gpu[index]) + 1 - int(self.req_states.prompt_len.np[index])
        depth, max_tokens = self.speculator.tree_depth, self.tree_requests[req_id]
        if max_tokens is not None:
            depth = max(0, min(depth, max_tokens - emitted - 1))
        return depth * self.speculator.tree_width
