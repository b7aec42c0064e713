"""The CPU worker. Importing this module turns on vLLM's stand-ins for torch.cuda: workers on CPU only."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  # must come before anything that touches torch.cuda
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.cpu import model_runner as vllm_cpu_runner

from .patching import replaced
from .runner import SubSpecRunner, make_runner
from .worker import SubSpecWorkerMixin

topk_topp_sampler.HAS_TRITON = False  # the interpreter rejects this kernel; vLLM has a torch path for CPU


class SubSpecCPUWorker(SubSpecWorkerMixin, CPUWorker):
    """The CPU worker; its `init_device` names vLLM's runner class directly."""

    def init_device(self):
        runner_cls = type("SubSpecCPUModelRunner", (SubSpecRunner, vllm_cpu_runner.CPUModelRunner), {})
        make = lambda vllm_config, device: make_runner(runner_cls, vllm_config, device)  # noqa: E731
        with replaced(vllm_cpu_runner, "CPUModelRunner", make):
            super().init_device()
