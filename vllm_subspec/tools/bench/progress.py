"""Progress of a whole run: how much is left, and for how long."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from contextlib import AbstractContextManager

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
    """The clock on standard error: a bar in a terminal, elsewhere a line for each stage."""

    def __init__(self, clock: Clock):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.clock = clock
        self.in_terminal = sys.stderr.isatty()
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(), TextColumn("{task.fields[left]}"), console=Console(stderr=True), transient=True,
            disable=not self.in_terminal,
        )  # fmt: skip
        self.task = self.progress.add_task("starting", total=1.0, left="")
        self.stage = ""
        self.began = self.last = time.perf_counter()

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def now(self, what: str) -> None:
        """A step begins."""
        self.last = time.perf_counter()
        self.progress.update(self.task, description=what)
        if not self.in_terminal and what != self.stage:
            line = ", ".join(filter(None, [what, self._left()]))
            print(f"{_clock(self.last - self.began)} {line}", file=sys.stderr, flush=True)
        self.stage = what

    def step(self, step: Step) -> None:
        """A step is over, and the next begins."""
        now = time.perf_counter()
        self.clock.add(step, now - self.last)
        self.last = now
        self.progress.update(self.task, completed=self.clock.share(), left=self._left())

    def _left(self) -> str:
        left = self.clock.left()
        return "" if left is None else f"about {_clock(left)} left"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02}"
