"""Weights that vLLM leaves in CPU memory and reads from there in place (`--cpu-offload-gb`): the target copies each to
the GPU before it multiplies.

A product reads a weight once for every tile of rows that it works on, which costs nothing in GPU memory and much over
PCIe: 289 rows take 1.7 times as long as one (12.3 GB on an H200). A copy crosses once. One row gains 7%.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import default_unquantized_gemm

from .offloaded import read_in_place

logger = init_logger("vllm.subspec.uva")

COPIES: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""Where a weight is copied to, by its address: an argument of its own would make the operator change what it is given,
and another graph of every layer. A weight that is not in here is multiplied by where it lies."""


def copy_before_use(model: torch.nn.Module) -> None:
    """Have ``model`` copy each offloaded weight to the GPU when it is used, one after the other into one buffer.

    To be called when the model is loaded and before vLLM sizes the KV cache. Without memory for the buffer the weights
    are read where they lie, by the same operator: vLLM keeps compiled graphs from one start to the next, and how much
    memory was left is no part of their key.
    """
    linears = [m for m in model.modules() if isinstance(m, LinearBase) and is_plain(m) and read_in_place(m.weight)]
    if not linears:
        return
    size = max(linear.weight.nbytes for linear in linears)
    buffer = None
    try:
        buffer = torch.empty(size, dtype=torch.uint8, device=linears[0].weight.device)
    except torch.OutOfMemoryError:
        logger.warning("No GPU memory for a buffer of %d MiB, without which a tree costs 1.7 passes", size >> 20)
    for linear in linears:
        linear.quant_method = CopiedWeightMethod(linear.weight, buffer)


def is_plain(linear: LinearBase) -> bool:
    """Whether vLLM multiplies by this linear's weight as `linear_in_cpu_memory` does by its copy."""
    return getattr(linear.quant_method, "_gemm_impl", None) is default_unquantized_gemm


class CopiedWeightMethod(UnquantizedLinearMethod):
    """A linear's own product, of a copy of its weight in ``buffer`` (bytes, at least as many), if there is one."""

    def __init__(self, weight: torch.Tensor, buffer: torch.Tensor | None):
        if buffer is not None:
            self.copy = COPIES[weight.data_ptr()] = buffer[: weight.nbytes].view(weight.dtype).view(weight.shape)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ops.vllm_subspec.linear_in_cpu_memory(x, layer.weight, bias)


@torch.library.custom_op("vllm_subspec::linear_in_cpu_memory", mutates_args=())
def linear_in_cpu_memory(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """An operator, so that a compiler sees no buffer that changes.

    Args:
        x: [rows, in]
        weight: [out, in], the one in CPU memory, as the GPU sees it
        bias: [out] or None

    Returns:
        [rows, out]
    """
    copy = COPIES.get(weight.data_ptr())
    return torch.nn.functional.linear(x, weight if copy is None else copy.copy_(weight), bias)


@linear_in_cpu_memory.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
