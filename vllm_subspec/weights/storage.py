"""How a substitute is stored: the sizes that vLLM's 4-bit kernel takes, and the bytes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

GPU_GROUP_SIZES = (32, 64, 128)
"""Group sizes of vLLM's 4-bit kernel on GPUs, of those that a speculative config may say"""
TILES = {"cuda": ((64, 128), (128, 64)), "cpu": ((32, 32),)}
"""What outputs and inputs must be multiples of, by device: one of Marlin's two pairs, the pair of CPUWNA16"""
MOST_PADDING = 1 / 7
"""Of the weight's own bytes in groups of 64 (or less, if less is asked for): at most 4.93 bits a weight, padding
counted. Any inputs from 392 on are within it, where there are enough outputs."""
CODE_BYTES, SCALE_BYTES, ZERO_POINT_BYTES = 0.5, 2, 0.5


@dataclass(frozen=True)
class KernelShape:
    """A weight as a kernel stores it: rows and columns of zeros make up its sizes."""

    outputs: int
    inputs: int
    group_size: int
    """Divides ``inputs``"""

    @property
    def nbytes(self) -> int:
        return int(self.outputs * self.inputs * _bytes_per_weight(self.group_size))


def kernel_shape(outputs: int, inputs: int, group_size: int, device: str) -> KernelShape | None:
    """The best that a kernel takes for a weight [outputs, inputs], or None: padding would be too much of it.

    One without more inputs, which every product had to add, or else the smallest.

    Args:
        group_size: the largest that is wanted; its half, quarter .. is taken where that is better
        device: type of a torch device
    """
    shapes = [
        KernelShape(_round_up(outputs, rows), _round_up(inputs, math.lcm(columns, group)), group)
        for group in _group_sizes(group_size, device)
        for rows, columns in TILES.get(device, ())
    ]
    most = (1 + MOST_PADDING) * outputs * inputs * _bytes_per_weight(min(group_size, 64))
    small = [shape for shape in shapes if shape.nbytes <= most]
    return min(small, key=lambda shape: (shape.inputs > inputs, shape.nbytes), default=None)


def stored_bytes(outputs: int, inputs: int, group_size: int, itemsize: int, device: str = "cuda") -> int:
    """Bytes of the substitute for a weight [outputs, inputs] of ``itemsize`` bytes a number (see `substitute`).

    Without a kernel: two codes a byte, zero-points of a byte. In float32 it is dense.
    """
    if itemsize > 2:
        return outputs * inputs * itemsize
    if (shape := kernel_shape(outputs, inputs, group_size, device)) is not None:
        return shape.nbytes
    return outputs * (-(-inputs // 2) + -(-inputs // group_size) * (SCALE_BYTES + 1))


def _bytes_per_weight(group_size: int) -> float:
    return CODE_BYTES + (SCALE_BYTES + ZERO_POINT_BYTES) / group_size


def _group_sizes(group_size: int, device: str) -> list[int]:
    """That size, its half, quarter .. down to 32, as far as the device's kernel takes them."""
    sizes = [group_size]
    while sizes[-1] >= 64 and sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return [size for size in sizes if (size in GPU_GROUP_SIZES if device == "cuda" else size % 2 == 0)]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
