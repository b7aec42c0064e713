"""``vllm-subspec tune``: the tree that is fastest for a model on this machine, measured in one engine."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from . import report
from .command import prepare
from .measure import middle, pooled
from .run import run_without_files
from .settings import Settings, parse_pairs, resolve

WIDTHS, DEPTHS = [6, 16, 24], [8, 16, 32, 48]
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
    result = run_without_files(settings, model, cpu)
    rows = pooled(result["summary"])
    report.print_report({**result, "summary": rows}, console)
    chosen = max(rows, key=lambda r: middle(r, "decode_speed") or 0.0, default=None)
    if chosen is None:
        print("vllm-subspec: nothing was measured", file=sys.stderr)
        return 1
    console.print(f"The fastest of these is {chosen['method'].removeprefix('subspec ')}; to paste:")
    console.print(f"--speculative-config '{json.dumps(config(chosen, settings))}'", markup=False, soft_wrap=True)
    return 0


def config(chosen: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """The speculative config of a measured row."""
    width, depth = chosen["tree"]
    return {"method": "subspec", **settings.subspec, "tree_width": width, "tree_depth": depth}
