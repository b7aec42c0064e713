"""CPU memory: what offloaded weights take of it, and what is there to take."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ..sizes import GIB, gib
from .advise import Plan

PROCESSES = 3 * GIB
"""vLLM's two processes, front end and engine, with torch and CUDA's libraries; rounded up"""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXACT = "pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"
"""Without this torch rounds a pinned tensor up to a power of two, and keeps what was freed."""
EXACT_SINCE = (2, 13)
"""Older releases of torch do not start with these settings"""
PINNING_ON_WSL = "VLLM_WSL2_ENABLE_PIN_MEMORY"
WSL_LIMIT = "On WSL, Windows lets all programs together pin about half of the machine's memory."


@dataclass(frozen=True)
class Host:
    """This machine, or what of it a container may use."""

    available: int | None
    """Bytes that can still be taken; None where that cannot be told"""
    limit: str
    """Who says so"""
    wsl: bool


@dataclass(frozen=True)
class Need:
    """Bytes of CPU memory, processes included."""

    loading: int
    """The most at any time"""
    serving: int
    """What stays taken"""


def this_host(root: Path = Path("/")) -> Host:
    """The tightest of free memory and the memory limits of the control groups that this process is in (v1 and v2).

    Args:
        root: where /proc and /sys are
    """
    limits = [*_free_memory(root), *_group_limits(root)]
    kernel = _read(root / "proc/version") or ""
    return Host(*min(limits, default=(None, "")), wsl="microsoft" in kernel.lower())


def needed(plan: Plan, exact: bool) -> Need:
    """CPU memory of a plan.

    vLLM's prefetch offloader pins every offloaded parameter when the model is built. After loading, vLLM moves each
    linear to the GPU to process it and pins a second copy; the first is dropped when all are done.

    Args:
        exact: torch is told `EXACT`. Else each copy has the next power of two of bytes, and the first copies stay in
            torch's cache.
    """
    pinned = sum(_pinned(plan.model.layers[i], plan.run.itemsize, exact) for i in plan.offloaded)
    return Need(loading=PROCESSES + 2 * pinned, serving=PROCESSES + (pinned if exact else 2 * pinned))


def _pinned(layer, itemsize: int, exact: bool) -> int:
    sizes = [outputs * inputs * itemsize for outputs, inputs in layer.linears.values()]
    rounded = sizes if exact else [1 << (size - 1).bit_length() for size in sizes]
    return sum(rounded) + layer.others * itemsize


def can_be_exact(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `EXACT` may be set: torch knows it, and the user has set nothing that it would replace."""
    release = tuple(int(part) for part in version("torch").split(".")[:2])
    return release >= EXACT_SINCE and not _settings(environ)


def will_be_exact(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torch will pin no more than it is asked for: `vllm-subspec serve` sets `EXACT`, or the user did."""
    return can_be_exact(environ) or "pinned_max_cached_size_mb" in _settings(environ)


def _settings(environ: Mapping[str, str]) -> str:
    return next((environ[name] for name in ALLOCATOR_VARIABLES if environ.get(name)), "")


def obstacles(need: Need, host: Host, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Why a server would not start on this machine, each in a sentence."""
    found = []
    if host.available is not None and need.loading > host.available:
        found.append(
            f"loading takes {gib(need.loading)} of CPU memory, offloaded weights twice, and {gib(host.available)} are "
            f"available ({host.limit}): {gib(need.loading - host.available)} are missing"
        )
    if host.wsl and environ.get(PINNING_ON_WSL, "0") in ("", "0"):
        found.append(f"on WSL vLLM pins memory, which subspec needs, only with {PINNING_ON_WSL}=1; set it")
    return found


def _free_memory(root: Path) -> Iterator[tuple[int, str]]:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024, "MemAvailable"


def _group_limits(root: Path) -> Iterator[tuple[int, str]]:
    """What each limit leaves. File pages of a group count as free: the kernel drops them first."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount, names, prefix = root / "sys/fs/cgroup", ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):
            mount, prefix = root / "sys/fs/cgroup/memory", "total_"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = mount / path.lstrip("/")
        for directory in (group, *group.parents):
            limit, used = (_read(directory / name) for name in names)
            if limit and used and limit.strip().isdigit():
                pages = dict(item.split() for item in (_read(directory / "memory.stat") or "").splitlines())
                files = sum(int(pages.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                yield max(0, int(limit) - int(used) + files), "the control group's limit"
            if directory == mount:
                break


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
