"""What ``vllm-subspec bench`` does with its arguments."""

from __future__ import annotations

import argparse
import logging
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import report
from .run import default_directory, run_methods
from .settings import NEED_DRAFT, Settings, check_model, parse_pairs, parse_sweep, resolve

INTERRUPTED = 130
"""Exit status after Ctrl-C or a request to terminate, as shells have it after the first"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; each overrides the key of the same name in the YAML file."""
    add = parser.add_argument
    add("--config", metavar="YAML", help="a file that describes the run (see examples/)")
    add("--model", help="local path or hub id; default: SmolLM2-135M-Instruct")
    add("--methods", nargs="+", metavar="METHOD", help="vanilla subspec draft_model eagle eagle3 ngram")
    add("--benchmarks", nargs="+", metavar="NAME[=FILE]", help="our own prompts by kind, or a public dataset's file")
    add("--samples", type=int, help="prompts of each benchmark")
    add("--seed", type=int, help="chooses the samples, and seeds sampled requests")
    add("--max-tokens", type=int, help="of each answer")
    add("--plain-tokens", type=int, help="of each answer of vanilla, where fewer will do: a plain pass is a plain pass")
    add("--temperature", type=float, nargs="+", help="one or more; 0 is greedy")
    add("--repeats", type=int, help="how often each method runs, in turn with the others")
    add("--draft", metavar="MODEL", help="draft checkpoint of draft_model, eagle and eagle3")
    add("--draft-tokens", type=int, help="tokens that vLLM's own methods propose in a round")
    add("--draft-options", nargs="+", metavar="KEY=VALUE", help="further keys of vLLM's speculative config for --draft")
    add("--subspec", nargs="+", metavar="KEY=VALUE", help="options of method subspec, as tree_width=8")
    add("--sweep", nargs="+", metavar="KEY=A,B", help="tree (as 6x48), or depth, width, ...: options of subspec")
    add("--ablate", action="store_true", default=None, help="method subspec in five steps, from substitutes alone")
    add("--engine", nargs="+", metavar="KEY=VALUE", help="arguments of vllm.LLM, the same for all methods")
    add("--vram", metavar="SIZE", help="GPU memory that each engine process may use, as 8GiB")
    add("--timeout", type=float, help="seconds for each engine process")
    add("--out", metavar="DIRECTORY", help="for results.json, results.md, plots and logs; default: bench-DATE-TIME")
    add("--redo", metavar="RESULTS.JSON", help="measure nothing: tables and plots of a stored run again")
    add("--summary", nargs=2, metavar=("RESULTS.JSON", "FILE"), help="measure nothing: a stored run without requests")


def settings_from(args: argparse.Namespace, yaml_text: str | None) -> Settings:
    """Settings from parsed arguments and the content of the YAML file. Raises as `settings.resolve` does."""
    flags: dict[str, Any] = {name: getattr(args, name, None) for name in Settings.__dataclass_fields__}
    for name in ("draft_options", "subspec", "engine"):
        flags[name] = parse_pairs(flags[name], "--" + name.replace("_", "-"))
    flags["sweep"] = parse_sweep(flags["sweep"])
    return resolve(yaml_text, flags)


def prepare(settings: Settings) -> tuple[Settings, str, bool]:
    """Check what only this machine can tell.

    Returns:
        The settings, the target's path or hub id, and whether vLLM's CPU build is installed.

    Raises:
        ValueError, FileNotFoundError: it cannot work here; one sentence.
    """
    from ...cpu.platform import is_cpu_build
    from ..smollm2 import ensure_smollm2

    logging.disable(logging.WARNING)  # what vLLM says when this process imports it; the engines have logs of their own

    cpu = is_cpu_build()
    if cpu and settings.vram is not None:
        raise ValueError("--vram limits GPU memory, and this is vLLM's CPU build; leave it out")
    if settings.draft is not None and set(NEED_DRAFT) & set(settings.methods):
        check_model(settings.draft)
    if settings.model is None:
        model = str(ensure_smollm2())
        return replace(settings, model=model), model, cpu
    check_model(settings.model)
    return settings, str(Path(settings.model).expanduser()), cpu


def run_bench(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns the exit status: 0, or `INTERRUPTED`.

    Raises:
        ValueError, FileNotFoundError: bad input, or no method that gave a result; one sentence.
    """
    from rich.console import Console

    console = Console()
    if args.summary:
        stored, kept = map(Path, args.summary)
        kept.write_text(report.as_json(report.without_requests(report.read(stored))))
        return 0
    if args.redo:
        return redo(Path(args.redo), Path(args.out or Path(args.redo).parent), console)
    yaml_text = read_yaml(args.config)
    settings, model, cpu = prepare(settings_from(args, yaml_text))
    out = Path(args.out) if args.out else default_directory()
    about = {"command": shlex.join(["vllm-subspec", *portable(sys.argv[1:])]), "yaml": yaml_text}

    def save(so_far: dict[str, Any]) -> None:
        if so_far["answers"] or so_far["failures"]:
            report.write({**so_far, **about}, out)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the engine ends, what is finished is kept
    is_new = not out.exists()
    try:
        result = run_methods(settings, model, out, save, cpu)
    finally:
        if is_new and not (out / "results.json").exists():
            shutil.rmtree(out, ignore_errors=True)
    if result["interrupted"] and not (result["answers"] or result["failures"]):
        print("vllm-subspec: stopped before anything was measured", file=sys.stderr)
        return INTERRUPTED
    if not result["answers"] and not result["interrupted"]:
        raise ValueError("nothing was measured; " + "; ".join(report.remarks(result)))
    finish({**result, **about}, out, console)
    return INTERRUPTED if result["interrupted"] else 0


def redo(path: Path, out: Path, console: Any) -> int:
    """Tables and plots of a stored run."""
    result = report.read(path)
    out.mkdir(parents=True, exist_ok=True)
    finish(result, out, console)
    return 0


def finish(result: dict[str, Any], out: Path, console: Any) -> None:
    """Plots, files, terminal."""
    try:
        from .plots import draw_all

        draw_all(result["summary"], out)
    except ModuleNotFoundError as error:
        console.print(f"no plots: {error.name} is not installed (pip install 'vllm-subspec\\[bench]')")
    report.write(result, out)
    report.print_report(result, console)
    console.print(f"written to {out}", markup=False)


def read_yaml(path: str | None) -> str | None:
    """Content of the YAML file.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if path is None:
        return None
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    return Path(path).read_text()


def portable(words: list[str]) -> list[str]:
    """A command without this machine's directories."""
    short = []
    for word in words:
        key, sign, value = word.rpartition("=")
        short.append(key + sign + Path(value).name if Path(value).is_absolute() else word)
    return short
