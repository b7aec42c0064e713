"""Data-free 4-bit quantization with HQQ (step 1 of the algorithm)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class QuantizedWeight:
    """A weight as ``(codes - zeros) * scales``, one scale and integer zero-point per group of inputs."""

    codes: torch.Tensor
    """[out, in] uint8, 0 .. 2**bits - 1"""
    scales: torch.Tensor
    """[out, in // group_size], the weight's dtype"""
    zeros: torch.Tensor
    """[out, in // group_size] uint8, 0 .. 2**bits - 1"""

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantize(self) -> torch.Tensor:
        """[out, in], the scales' dtype"""
        spread = lambda t: t.repeat_interleave(self.group_size, dim=1)  # noqa: E731
        return (self.codes.to(self.scales.dtype) - spread(self.zeros).to(self.scales.dtype)) * spread(self.scales)


def fitting_group_size(group_size: int, input_size: int) -> int:
    """The largest group size that divides both: ``group_size`` itself wherever a model's sizes allow it."""
    return math.gcd(group_size, input_size)


GPU_GROUP_SIZES = (32, 64, 128)
"""Group sizes of vLLM's 4-bit kernel on GPUs, of those that a speculative config may say"""
MAX_WEIGHTS = 1 << 23
"""Weights that HQQ works on at once: it holds about ten float32 copies."""


def quantize(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """HQQ along the input dimension (axis 1) with its half-quadratic optimization of the zero-point.

    HQQ leaves a real zero-point; 4-bit kernels want an integer. It is rounded, and the codes are chosen again for it.

    Args:
        weight: [out, in], any floating dtype, on the device where the work is to be done
        bits: 4
        group_size: divides ``in``

    Besides the weight and the result it needs memory for `MAX_WEIGHTS` weights at a time.
    """
    out_size, in_size = weight.shape
    make = lambda columns, dtype: torch.empty(out_size, columns, dtype=dtype, device=weight.device)  # noqa: E731
    groups = in_size // group_size
    result = QuantizedWeight(make(in_size, torch.uint8), make(groups, weight.dtype), make(groups, torch.uint8))
    for rows in slices(weight):
        result.codes[rows], result.scales[rows], result.zeros[rows] = _quantize_rows(weight[rows], bits, group_size)
    return result


def slices(weight: torch.Tensor) -> list[slice]:
    """Rows of a weight that are worked on at once: at most `MAX_WEIGHTS` weights, or one row."""
    rows = max(1, MAX_WEIGHTS // weight.shape[1])
    return [slice(start, start + rows) for start in range(0, weight.shape[0], rows)]


def _quantize_rows(weight: torch.Tensor, bits: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from hqq.core.quantize import Quantizer

    out_size, in_size = weight.shape
    top = 2**bits - 1
    _, meta = Quantizer.quantize(
        weight, nbits=bits, group_size=group_size, axis=1, optimize=True, bitpack=False, device=str(weight.device)
    )
    scales = meta["scale"].float()  # [groups, 1]
    scales = scales.to(weight.dtype).float()  # what the kernels multiply by
    zeros = meta["zero"].float().round().clamp(0, top)
    codes = (weight.float().view(-1, group_size) / scales + zeros).round().clamp(0, top)
    return (
        codes.to(torch.uint8).view(out_size, in_size),
        scales.to(weight.dtype).view(out_size, -1),
        zeros.to(torch.uint8).view(out_size, -1),
    )
