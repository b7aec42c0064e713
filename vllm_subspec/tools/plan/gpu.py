"""The GPU that is there, as far as a plan depends on it."""

from __future__ import annotations

from dataclasses import dataclass

from .memory import CUDA_CONTEXT


@dataclass(frozen=True)
class Gpu:
    total: int
    """Bytes, as vLLM reads them"""
    others: int = 0
    """Bytes that other processes hold"""
    bfloat16: bool = True
    """Whether it computes in bfloat16 (compute capability 8.0)"""


def this_gpu() -> Gpu | None:
    """The current GPU; None without one. Takes a CUDA context, which stays until the process ends."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    others = max(0, total - free - torch.cuda.memory_reserved() - CUDA_CONTEXT)
    return Gpu(total, others, torch.cuda.get_device_capability() >= (8, 0))
