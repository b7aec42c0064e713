"""Progress of a whole run: how much is left, and for how long."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from contextlib import AbstractContextManager
from typing import Any

Step = tuple[str, str]
"""("start" | "warm" | "answer", method or variant)"""


class Clock:
    """Estimates the time left from the steps seen so far; a step not yet seen takes as long as others of its kind."""

    def __init__(self, planned: Counter[Step]):
        self.planned = planned
        self.seen: dict[Step, list[float]] = defaultdict(list)

    def add(self, step: Step, seconds: float) -> None:
        self.seen[step].append(seconds)

    def drop(self, step: Step, count: int = 1) -> None:
        """These steps will not happen."""
        self.planned[step] -= count

    def share(self) -> float:
        """Of the planned steps, how many were seen; 0 to 1."""
        return sum(len(s) for s in self.seen.values()) / max(1, sum(self.planned.values()))

    def left(self) -> float | None:
        """Seconds, or None before anything was seen."""
        if not self.seen:
            return None
        return sum(
            max(0, count - len(self.seen.get(step, ()))) * self._expected(step) for step, count in self.planned.items()
        )

    def _expected(self, step: Step) -> float:
        alike = [s for (kind, _), seconds in self.seen.items() if kind == step[0] for s in seconds]
        known = self.seen.get(step) or alike or [s for seconds in self.seen.values() for s in seconds]
        return sum(known) / len(known)


class Bar(AbstractContextManager):
    """The clock as a bar in the terminal."""

    def __init__(self, clock: Clock, console: Any = None):
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.clock = clock
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(), TextColumn("{task.fields[left]}"), console=console, transient=True,
        )  # fmt: skip
        self.task = self.progress.add_task("starting", total=1.0, left="")
        self.last = time.perf_counter()

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def now(self, what: str) -> None:
        """A step begins."""
        self.progress.update(self.task, description=what)
        self.last = time.perf_counter()

    def step(self, step: Step) -> None:
        """A step is over, and the next begins."""
        now = time.perf_counter()
        self.clock.add(step, now - self.last)
        self.last = now
        left = self.clock.left()
        minutes, seconds = divmod(round(left or 0), 60)
        self.progress.update(self.task, completed=self.clock.share(), left=f"about {minutes}:{seconds:02} left")
