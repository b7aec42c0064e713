"""What each round did, kept for whoever asks (the demo, a benchmark)."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass


@dataclass
class Round:
    """One verification pass of the target and the draft before it."""

    request: str
    """vLLM's internal request id"""
    tree_size: int
    """Nodes verified, root included; 1 for a plain decoding step"""
    accepted: int
    """Draft tokens accepted; the round emitted one more"""
    draft_seconds: float
    verify_seconds: float
    """The target's pass and everything after it, up to the commit"""


class Rounds:
    """The latest rounds, bounded."""

    def __init__(self, keep: int = 100_000):
        self._rounds: deque[Round] = deque(maxlen=keep)

    def add(self, finished: Round) -> None:
        self._rounds.append(finished)

    def take(self) -> list[dict]:
        """All rounds since the last call, as dictionaries."""
        taken = [asdict(r) for r in self._rounds]
        self._rounds.clear()
        return taken
