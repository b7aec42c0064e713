"""vLLM's workers with our runner."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from .runner import SubSpecRunner, make_runner


class SubSpecWorkerMixin:
    """What both workers add for callers of ``collective_rpc``."""

    def subspec_rounds(self) -> list[dict]:
        """The rounds since the last call (see `vllm_subspec.stats.Round`), oldest first."""
        return self.model_runner.rounds.take()

    def subspec_set_tree(self, width: int, depth: int) -> None:
        """Draft trees of another shape from now on, for sweeps: no larger than the engine was configured for."""
        self.model_runner.set_tree(width, depth)

    def subspec_trace(self, on: bool) -> list[dict]:
        """Record every round's tree from now on, or stop and return them (see `vllm_subspec.trace.TracedRound`)."""
        from .trace import Tracer

        if on:
            self._tracer = Tracer(self.model_runner)
            return []
        return self._tracer.stop()


class SubSpecWorker(SubSpecWorkerMixin, Worker):
    """The CUDA worker."""

    def _make_model_runner(self):
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        runner_cls = type("SubSpecGPUModelRunner", (SubSpecRunner, GPUModelRunner), {})
        return make_runner(runner_cls, self.vllm_config, self.device)
