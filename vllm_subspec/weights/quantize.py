"""Data-free 4-bit quantization with HQQ (step 1 of the algorithm)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class QuantizedWeight:
    """A weight as ``(codes - zeros) * scales``, one scale and integer zero-point per group of inputs.

    The last group of a row is shorter where the inputs are no multiple of the group size.
    """

    codes: torch.Tensor
    """[out, in] uint8, 0 .. 2**bits - 1"""
    scales: torch.Tensor
    """[out, groups], the weight's dtype"""
    zeros: torch.Tensor
    """[out, groups] uint8, 0 .. 2**bits - 1"""
    group_size: int

    def dequantize(self) -> torch.Tensor:
        """[out, in], the scales' dtype"""
        spread = lambda t: t.repeat_interleave(self.group_size, dim=1)[:, : self.codes.shape[1]]  # noqa: E731
        return (self.codes.to(self.scales.dtype) - spread(self.zeros).to(self.scales.dtype)) * spread(self.scales)


MAX_WEIGHTS = 1 << 23
"""Weights that HQQ works on at once: it holds about ten float32 copies."""


def quantize(weight: torch.Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """HQQ along the input dimension (axis 1) with its half-quadratic optimization of the zero-point.

    HQQ leaves a real zero-point; 4-bit kernels want an integer. It is rounded, and the codes are chosen again for it.

    Args:
        weight: [out, in], any floating dtype, on the device where the work is to be done
        bits: 4
        group_size: inputs that share a scale and a zero-point

    Besides the weight and the result it needs memory for `MAX_WEIGHTS` weights at a time.
    """
    out_size, in_size = weight.shape
    make = lambda columns, dtype: torch.empty(out_size, columns, dtype=dtype, device=weight.device)  # noqa: E731
    groups = -(-in_size // group_size)
    result = QuantizedWeight(
        make(in_size, torch.uint8), make(groups, weight.dtype), make(groups, torch.uint8), group_size
    )
    for rows in slices(weight):
        result.codes[rows], result.scales[rows], result.zeros[rows] = _quantize_rows(weight[rows], bits, group_size)
    return result


def slices(weight: torch.Tensor) -> list[slice]:
    """Rows of a weight that are worked on at once: at most `MAX_WEIGHTS` weights, or one row."""
    out_size, in_size = weight.shape
    rows = max(1, MAX_WEIGHTS // in_size)
    return [slice(start, min(start + rows, out_size)) for start in range(0, out_size, rows)]


def _quantize_rows(weight: torch.Tensor, bits: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from hqq.core.quantize import Quantizer

    out_size, in_size = weight.shape
    top = 2**bits - 1
    if short := in_size % group_size:
        # Zeros fill up the last group: its values alone may lie on one side of zero, out of reach of a zero-point.
        weight = torch.nn.functional.pad(weight, (0, group_size - short))
    _, meta = Quantizer.quantize(
        weight, nbits=bits, group_size=group_size, axis=1, optimize=True, bitpack=False, device=str(weight.device)
    )
    scales = meta["scale"].float()  # [groups, 1]
    scales = scales.to(weight.dtype).float()  # what the kernels multiply by
    zeros = meta["zero"].float().round().clamp(0, top)
    codes = (weight.float().view(-1, group_size) / scales + zeros).round().clamp(0, top)
    return (
        codes.to(torch.uint8).view(out_size, -1)[:, :in_size],
        scales.to(weight.dtype).view(out_size, -1),
        zeros.to(torch.uint8).view(out_size, -1),
    )
