"""What each round did, kept for whoever asks (the demo, a benchmark), without a wait while it is recorded."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass
class Round:
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


class Rounds:
    """The latest rounds, bounded. On CUDA what is recorded stays on the device until `take`."""

    def __init__(self, device: torch.device, keep: int = 100_000):
        self._on_cuda = device.type == "cuda"
        self._rounds: deque[tuple[str, int, Any, list]] = deque(maxlen=keep)

    def mark(self) -> Any:
        """A point in time on the device."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, request: str, tree_size: int, accepted: torch.Tensor | int, marks: list) -> None:
        """Record a round; ``marks`` are its start, the end of its draft and its end."""
        self._rounds.append((request, tree_size, accepted, marks))

    def take(self) -> list[dict]:
        """All rounds since the last call, as dictionaries of `Round`."""
        if self._on_cuda:
            torch.cuda.synchronize()
        taken = [
            asdict(Round(request, tree_size, int(accepted), *(self._seconds(a, b) for a, b in zip(marks, marks[1:]))))
            for request, tree_size, accepted, marks in self._rounds
        ]
        self._rounds.clear()
        return taken

    def _seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000 if self._on_cuda else end - start
