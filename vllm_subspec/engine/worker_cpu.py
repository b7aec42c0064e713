"""The CPU worker. Importing this module turns on vLLM's stand-ins for torch.cuda: workers on CPU only."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  # must come before anything that touches torch.cuda
from vllm.v1.worker.cpu import model_runner as vllm_cpu_runner

from ..cpu.attention import CPUTreeAttention
from ..cpu.kernels import GrammarWorker, use_torch_top_k_top_p
from ..cpu.round import OPERATIONS
from ..patching import replaced
from .runner import SubSpecRunner, make_runner
from .worker import SubSpecWorkerMixin


class SubSpecCPUModelRunner(SubSpecRunner, vllm_cpu_runner.CPUModelRunner):
    """The CPU runner."""

    operations = OPERATIONS
    tree_attention = CPUTreeAttention

    def load_model(self, *args, **kwargs) -> None:
        super().load_model(*args, **kwargs)
        use_torch_top_k_top_p()
        self.structured_outputs_worker = GrammarWorker()


class SubSpecCPUWorker(SubSpecWorkerMixin, CPUWorker):
    """The CPU worker; its `init_device` names vLLM's runner class directly."""

    runner_cls: type[SubSpecCPUModelRunner] = SubSpecCPUModelRunner

    def init_device(self):
        make = lambda vllm_config, device: make_runner(self.runner_cls, vllm_config, device)  # noqa: E731
        with replaced(vllm_cpu_runner, "CPUModelRunner", make):
            super().init_device()
