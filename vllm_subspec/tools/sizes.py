"""Sizes of memory as users write them."""

from __future__ import annotations

import re

MIB, GIB = 2**20, 2**30
UNITS = {"gib": GIB, "gb": 10**9, "mib": MIB, "mb": 10**6, "": GIB}
NOMINAL = 1.08
"""A card sold as 8 GB may report 7.6 GiB: sizes up to so many times what there is mean the whole card"""


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def capped(vram: int, total: int) -> int:
    """``vram`` bytes, or all of a GPU that is called by that size.

    Raises:
        ValueError: the GPU has less.
    """
    if vram > NOMINAL * total:
        less = f"give {total // MIB}MiB or less"
        raise ValueError(f"--vram {gib(vram)} is more than the {gib(total)} of this GPU; {less}")
    return min(vram, total)


def parse_size(text: str) -> int:
    """Bytes of ``8GiB``, ``8GB``, ``8192MiB``, ``8192MB`` or ``8`` (GiB).

    Raises:
        ValueError: another form, or not above zero.
    """
    form = re.fullmatch(r"(\d+(?:\.\d+)?) *(gib|gb|mib|mb|)", str(text).strip().lower())
    if form is None or float(form[1]) == 0:
        raise ValueError(f"--vram takes a size above zero, as 8GiB, 8GB, 8192MiB or 8 (GiB), not {text!r}")
    return int(float(form[1]) * UNITS[form[2]])
