"""vLLM's workers with our runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu.warmup import warmup_kernels
from vllm.v1.worker.gpu_worker import Worker

from ..patching import replaced
from .runner import SubSpecRunner, make_runner
from .stats import time_waits


class SubSpecWorkerMixin:
    """What both workers add for callers of ``collective_rpc``, and what they refuse them."""

    def subspec_rounds(self) -> list[dict]:
        """The rounds since the last call (see `vllm_subspec.engine.stats.RoundRecord`), oldest first."""
        return self.model_runner.rounds.take()

    def subspec_time_waits(self) -> bool:
        """Have rounds tell how long their passes waited for streamed layers (see `vllm_subspec.engine.stats.time_waits`)."""
        return time_waits(self.model_runner.rounds)

    def subspec_set_tree(self, width: int, depth: int, **options: float) -> None:
        """Draft other trees from now on, for sweeps (see `speculator.SubSpecSpeculator.set_tree`)."""
        self.model_runner.set_tree(width, depth, **options)

    def reload_weights(self, *args, **kwargs) -> None:
        raise NotImplementedError(
            "subspec: reload_weights would leave the substitutes those of the old weights; start a new engine"
        )

    def subspec_trace(self, on: bool) -> list[dict]:
        """Record every round's tree from now on, or no longer; returns what was recorded (`trace.TracedRound`)."""
        from .trace import Tracer

        tracer = getattr(self, "_tracer", None)
        recorded = tracer.stop() if tracer is not None else []
        self._tracer = Tracer(self.model_runner) if on else None
        return recorded


WARM_UP_STEPS = 6
"""vLLM's warm-up sends one request through so many steps with drafts (its prompt counted as one)."""


def warm_up(runner: Any, *execute: Any) -> None:
    """vLLM's warm-up of kernels, with fewer drafts in a step and, if need be, fewer requests.

    A draft is usually a few tokens there, so vLLM does not look. A tree's nodes would overrun a request's block table; and
    with a tree for each of hundreds of requests, their logits would take GiB that the KV cache has already.
    """
    requests, drafts = runner.scheduler_config.max_num_seqs, runner.num_speculative_steps
    rows = max(requests, 1 + drafts)  # of logits: what memory was measured with
    room = (runner.max_model_len - 1) // WARM_UP_STEPS
    drafts = max(1, min(rows // min(requests, 2), 1 + drafts, room) - 1)  # two requests: kernels of batches warm up too
    requests = max(1, min(requests, rows // (1 + drafts)))
    with (
        replaced(runner, "num_speculative_steps", drafts),
        replaced(runner, "decode_query_len", drafts + 1),
        replaced(runner.scheduler_config, "max_num_seqs", requests),
    ):
        warmup_kernels(runner, *execute)


class SubSpecWorker(SubSpecWorkerMixin, Worker):
    """The CUDA worker."""

    runner_mixin: type[SubSpecRunner] = SubSpecRunner

    def compile_or_warm_up_model(self):
        with replaced(gpu_worker, "warmup_kernels", warm_up):
            times = super().compile_or_warm_up_model()
        if self.model_config.enforce_eager:  # vLLM captures nothing then; the draft is one graph a pass all the same
            self.model_runner.speculator.capture()
        self.model_runner.rounds.take()  # those of vLLM's warm-up are nobody's
        return times

    def _make_model_runner(self):
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        runner_cls = type("SubSpecGPUModelRunner", (self.runner_mixin, GPUModelRunner), {})
        return make_runner(runner_cls, self.vllm_config, self.device)
