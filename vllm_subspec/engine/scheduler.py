"""vLLM's scheduler, which counts a tree's levels where it would count its nodes.

A tree of D levels proposes D tokens in a row and up to D of them are accepted, whatever its width. So a draft counts as
the levels that were drafted (fewer than asked for where it ended early), and rows that carried no tree count as none.
vLLM's log line, ``/metrics``, `LLM.get_metrics` and metrics of requests all come from these counts.
"""

from __future__ import annotations

from vllm.config import SchedulerConfig
from vllm.config.utils import config
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from .grammar import allocate_masks


@config
class SubSpecSchedulerConfig(SchedulerConfig):
    """vLLM's SchedulerConfig with our class, which is no custom one: vLLM warns of those."""

    def get_scheduler_cls(self) -> type[Scheduler]:
        return SubSpecScheduler


class LevelMetrics(RequestSpecDecodeMetrics):
    """vLLM's metrics of one request; a step without a tree is none of its drafts."""

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        if num_draft_tokens:
            super().observe(num_draft_tokens, min(num_accepted, self.num_spec_tokens), detailed)


class SubSpecScheduler(Scheduler):
    """There are `tree_depth` positions. A tree that ``subspec_set_tree`` made deeper has levels beyond them, which are
    counted and have no position."""

    @property
    def tree_depth(self) -> int:
        return self.vllm_config.speculative_config.tree_depth

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics = LevelMetrics.new(self.tree_depth)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        allocate_masks(self.structured_output_manager)
        return super().get_grammar_bitmask(scheduler_output)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput):
        # What vLLM takes for drafted is what it scheduled, less what it is told was no draft.
        levels = getattr(model_runner_output, "drafted_levels", 0)
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        scheduler_output.num_invalid_spec_tokens = {req_id: len(rows) - levels for req_id, rows in scheduled.items()}
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int],
        request_id: str,
    ) -> SpecDecodingStats | None:
        levels, depth = num_draft_tokens - num_invalid_spec_tokens[request_id], self.tree_depth
        if not self.log_stats or not levels:
            return spec_decoding_stats
        stats = spec_decoding_stats or SpecDecodingStats.new(depth)
        stats.observe_draft(min(levels, depth), min(num_accepted_tokens, depth))
        stats.num_draft_tokens += max(0, levels - depth)
        stats.num_accepted_tokens += max(0, num_accepted_tokens - depth)
        return stats
