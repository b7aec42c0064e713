"""Acceptance length (tau) on the six prompts, for one or more tree settings."""

from __future__ import annotations

import os

from .generate import Generation, generate, start_engine, stop_engine
from .prompts import PROMPTS
from .smollm2 import ensure_smollm2

SETTINGS = [(6, 48, 0.2), (6, 48, 1.0), (6, 16, 0.2)]


def whole_passes(generation: Generation, max_tokens: int) -> list[int]:
    """Tokens emitted by each pass until ``max_tokens`` are there, the last pass counted whole."""
    emitted, total = [], 1  # the first token comes from the prefill
    for finished in generation.rounds:
        if total >= max_tokens:
            break
        emitted.append(finished["accepted"] + 1)
        total += emitted[-1]
    return emitted


def measure(
    model: str, settings: list[tuple[int, int, float]], max_tokens: int, **engine_args
) -> list[list[list[int]]]:
    """For each setting and prompt, the tokens emitted by each pass. Trees are drafted to their full depth.

    Args:
        settings: (tree width, tree depth, draft temperature)
        max_tokens: an answer counts up to here; a tree near it is not made smaller
    """
    results = []
    for width, depth, temperature in settings:
        spec = {
            "method": "subspec", "tree_width": width, "tree_depth": depth, "draft_temperature": temperature,
            "confidence_threshold": 0.0,
        }  # fmt: skip
        llm = start_engine(model, spec, **engine_args)
        answers = [generate(llm, prompt, max_tokens + 2 * depth, speculative=True) for prompt in PROMPTS]
        stop_engine(llm)
        results.append([whole_passes(answer, max_tokens) for answer in answers])
    return results


def run_tau(model: str | None, max_tokens: int, settings: list[tuple[int, int, float]] | None, dtype: str) -> int:
    """Print tau by prompt and setting."""
    from rich.console import Console
    from rich.table import Table

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    settings = settings or SETTINGS
    engine_args = dict(dtype=dtype, max_model_len=2048, max_num_seqs=1, enforce_eager=True)
    results = measure(model or str(ensure_smollm2()), settings, max_tokens, **engine_args)
    table = Table(title=f"tau (passes), greedy, {dtype}, at most {max_tokens} tokens")
    table.add_column("prompt")
    for width, depth, temperature in settings:
        table.add_column(f"k{width} D{depth} T{temperature}", justify="right")
    for i, prompt in enumerate(PROMPTS):
        cells = [result[i] for result in results]
        table.add_row(prompt[:60], *(f"{sum(c) / len(c):.2f} ({len(c)})" for c in cells))
    totals = [[n for answer in result for n in answer] for result in results]
    table.add_row("all six", *(f"{sum(t) / len(t):.2f} ({len(t)})" for t in totals))
    Console(width=120).print(table)
    return 0
