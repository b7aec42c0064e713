"""What each round did, kept for whoever asks (the demo, a benchmark), without a wait while it is recorded."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass
class RoundRecord:
    """One pass of the target and the draft before it."""

    request: str
    """vLLM's internal id of the first request in the batch"""
    tree_size: int
    """Nodes verified, root included; 1 for a plain decoding step"""
    accepted: int
    """Draft tokens accepted; the round emitted one more"""
    draft_seconds: float
    verify_seconds: float
    """The target's pass and everything after it, up to the commit"""
    wait_seconds: float | None = None
    """Of the pass, its waits for streamed layers; None where they are not timed (see `time_waits`)"""
    failed: bool = False
    """Whether drafting or verifying a tree failed: the pass emitted one plain token"""


class Rounds:
    """The latest rounds, bounded: a server whose rounds nobody takes keeps a few MB of them. On CUDA what is recorded
    stays on the device until `take`."""

    def __init__(self, device: torch.device, keep: int = 8192):
        self._on_cuda = device.type == "cuda"
        self._rounds: deque[tuple[str, int, Any, list, list, bool]] = deque(maxlen=keep)
        self.waits: list[tuple[Any, Any]] = []
        """Start and end of each timed wait of the step under way"""

    def mark(self) -> Any:
        """A point in time on the device."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(
        self, request: str, tree_size: int, accepted: torch.Tensor | int, marks: list, failed: bool = False
    ) -> None:
        """Record a round; ``marks`` are its start, the end of its draft and its end."""
        self._rounds.append((request, tree_size, accepted, marks, self.waits, failed))
        self.waits = []

    def take(self) -> list[dict]:
        """All rounds since the last call, as dictionaries of `RoundRecord`."""
        if self._on_cuda:
            torch.cuda.synchronize()
        taken = [
            asdict(
                RoundRecord(
                    request, tree_size, int(accepted), *(self._seconds(a, b) for a, b in zip(marks, marks[1:])),
                    wait_seconds=sum(self._seconds(a, b) for a, b in waits) if waits else None, failed=failed,
                )
            )
            for request, tree_size, accepted, marks, waits, failed in self._rounds
        ]  # fmt: skip
        self._rounds.clear()
        return taken

    def _seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self._on_cuda else end - start


def time_waits(rounds: Rounds) -> bool:
    """Time the passes' waits for layers that vLLM's prefetch offloader streams, from now on.

    Returns:
        Whether there is such an offloader. Its waits inside captured CUDA graphs are not timed.
    """
    from vllm.model_executor.offloader import get_offloader
    from vllm.model_executor.offloader.prefetch import PrefetchOffloader

    offloader = get_offloader()
    if not isinstance(offloader, PrefetchOffloader):
        return False
    if "_wait_for_layer" in vars(offloader):  # timed already
        return True
    wait = offloader._wait_for_layer

    def timed(layer_idx: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            return wait(layer_idx)
        start = rounds.mark()
        wait(layer_idx)
        rounds.waits.append((start, rounds.mark()))

    offloader._wait_for_layer = timed
    return True
