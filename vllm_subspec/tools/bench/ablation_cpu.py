"""The CPU worker of an ablation (see `vllm_subspec.engine.worker_cpu`)."""

from __future__ import annotations

from ...engine.worker_cpu import SubSpecCPUModelRunner, SubSpecCPUWorker  # isort: skip  # before what touches torch.cuda
from .ablation import AblationRunner


class AblationCPUModelRunner(AblationRunner, SubSpecCPUModelRunner):
    """The CPU runner of an ablation."""


class AblationCPUWorker(SubSpecCPUWorker):
    """The CPU worker of an ablation."""

    runner_cls = AblationCPUModelRunner
