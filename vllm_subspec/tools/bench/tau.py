"""``vllm-subspec tau``: acceptance length (tau) on the six prompts, by tree width, depth and draft temperature."""

from __future__ import annotations

from typing import Any

from ..prompts import PROMPTS
from .command import prepare
from .datasets import SIX
from .measure import Answer, acceptance_length, pass_tokens
from .run import run_without_files
from .settings import resolve

SETTINGS = [(6, 48, 0.2), (6, 48, 1.0), (6, 16, 0.2)]


def measure(
    model: str | None, settings: list[tuple[int, int, float]], max_tokens: int, **engine: Any
) -> list[list[Answer]]:
    """For each setting the answers to the six prompts, in order; trees are drafted to their full depth.

    Args:
        model: local path or hub id; None is SmolLM2-135M-Instruct
        settings: (tree width, tree depth, draft temperature)
        max_tokens: what tau is counted up to (see `measure.pass_tokens`); answers are longer

    Raises:
        ValueError, FileNotFoundError: bad input, or an engine that failed; one sentence.
    """
    results = []
    for width, depth, temperature in settings:
        tree = {"tree_width": width, "tree_depth": depth, "draft_temperature": temperature, "confidence_threshold": 0.0}
        run, model, cpu = prepare(resolve(None, {
            "model": model, "methods": ["subspec"], "benchmarks": [SIX], "samples": len(PROMPTS), "repeats": 1,
            "max_tokens": max_tokens + 2 * depth, "subspec": tree, "engine": engine,
        }))  # fmt: skip
        result = run_without_files(run, model, cpu)
        for why in result["failures"].values():
            raise ValueError(why)
        if result["interrupted"]:
            raise KeyboardInterrupt
        results.append(result["answers"])
    return results


def run_tau(model: str | None, max_tokens: int, settings: list[tuple[int, int, float]] | None, dtype: str) -> int:
    """Print tau by prompt and setting."""
    from rich.console import Console
    from rich.table import Table

    settings = settings or SETTINGS
    results = measure(model, settings, max_tokens, dtype=dtype, enforce_eager=True)
    table = Table(title=f"tau (passes), greedy, {dtype}, at most {max_tokens} tokens")
    table.add_column("prompt")
    for width, depth, temperature in settings:
        table.add_column(f"k{width} D{depth} T{temperature}", justify="right")
    cell = lambda answers: (  # noqa: E731
        f"{acceptance_length(answers, max_tokens):.2f} ({sum(len(pass_tokens(a, max_tokens)) for a in answers)})"
    )
    for i, prompt in enumerate(PROMPTS):
        table.add_row(prompt[:60], *(cell([answers[i]]) for answers in results))
    table.add_row("all six", *map(cell, results))
    Console(width=120).print(table)
    return 0
