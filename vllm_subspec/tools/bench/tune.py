"""``vllm-subspec tune``: the tree that is fastest for a model on this machine, measured in one engine."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from .command import prepare
from .measure import best, middle
from .run import run_methods
from .settings import Settings, parse_pairs, resolve

WIDTHS, DEPTHS = [6, 16, 24], [8, 16, 32, 48]
LOG_TAIL = 3000
"""Characters of a failed engine's log that are shown"""
BENCHMARKS = ["chat", "code", "math"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add = parser.add_argument
    add("model", nargs="?", help="local path or hub id; default: SmolLM2-135M-Instruct")
    add("--widths", type=int, nargs="+", default=WIDTHS, help="default: %(default)s")
    add("--depths", type=int, nargs="+", default=DEPTHS, help="default: %(default)s")
    add("--benchmarks", nargs="+", default=BENCHMARKS, metavar="NAME[=FILE]", help="default: %(default)s")
    add("--samples", type=int, default=1, help="prompts of each benchmark (default 1)")
    add("--max-tokens", type=int, default=128)
    add("--subspec", nargs="+", metavar="KEY=VALUE", help="further options of method subspec")
    add("--engine", nargs="+", metavar="KEY=VALUE", help="arguments of vllm.LLM: the offload flags, dtype, ...")
    add("--vram", metavar="SIZE", help="GPU memory that the process may use, as 8GiB")


def settings_from(args: argparse.Namespace) -> Settings:
    """The sweep as settings of a bench. Raises as `settings.resolve` does."""
    return resolve(None, {
        "model": args.model, "methods": ["subspec"], "benchmarks": args.benchmarks, "samples": args.samples,
        "max_tokens": args.max_tokens, "repeats": 1, "vram": args.vram,
        "sweep": {"width": args.widths, "depth": args.depths},
        "subspec": parse_pairs(args.subspec, "--subspec"), "engine": parse_pairs(args.engine, "--engine"),
    })  # fmt: skip


def run_tune(args: argparse.Namespace) -> int:
    """Measure, print a table and the fastest tree's config. Returns 1 if nothing could be measured."""
    from rich.console import Console

    console = Console()
    settings, model, cpu = prepare(settings_from(args))
    with tempfile.TemporaryDirectory() as directory:
        result = run_methods(settings, model, Path(directory), lambda so_far: None, cpu)
        logs = [log.read_text() for log in Path(directory).glob("logs/*")] if result["failures"] else []
    for line in result["failures"].values():
        print("\n".join(log[-LOG_TAIL:] for log in logs), file=sys.stderr)
        print(f"vllm-subspec: subspec stopped: {line.partition('; see ')[0]}", file=sys.stderr)
    if result["interrupted"]:
        print("vllm-subspec: interrupted; only what was finished by then counts", file=sys.stderr)
    rows = [r for r in result["summary"] if r["benchmark"] == "all" or len(settings.benchmarks) == 1]
    chosen = best(rows, lambda r: middle(r, "decode_speed"))
    if chosen is None:
        print("vllm-subspec: nothing was measured", file=sys.stderr)
        return 1
    console.print(table(rows, chosen))
    console.print("The fastest of these, to paste:")
    console.print(f"--speculative-config '{json.dumps(config(chosen, settings))}'", markup=False, soft_wrap=True)
    return 0


def config(chosen: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """The speculative config of a measured row."""
    width, depth = chosen["tree"]
    return {"method": "subspec", **settings.subspec, "tree_width": width, "tree_depth": depth}


def table(rows: list[dict[str, Any]], chosen: dict[str, Any]) -> Any:
    """rich's table of the trees, the fastest one marked."""
    from rich.table import Table

    shown = Table(title="greedy, all prompts")
    for name in ("width", "depth", "tok/s", "tau", "pass ms", "t_draft ms", "draft", "verify"):
        shown.add_column(name, justify="right")
    for r in sorted(rows, key=lambda r: r["tree"]):
        figures = [
            (middle(r, "decode_speed"), ".2f"), (middle(r, "tau"), ".2f"), (_ms(r, "pass"), ".1f"),
            (_ms(r, "t_draft"), ".2f"), (middle(r, "draft_share"), ".0%"), (middle(r, "verify_share"), ".0%"),
        ]  # fmt: skip
        cells = ["-" if value is None else f"{value:{form}}" for value, form in figures]
        shown.add_row(*map(str, r["tree"]), *cells, style="bold green" if r is chosen else None)
    return shown


def _ms(row: dict[str, Any], key: str) -> float | None:
    value = middle(row, key)
    return None if value is None else 1e3 * value
