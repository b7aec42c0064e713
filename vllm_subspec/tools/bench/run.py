"""The command: settings in, engines one after the other, repeat by repeat, files out."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..sizes import parse_size
from .datasets import load
from .measure import VANILLA, summarize
from .methods import Engine, plan
from .process import run_engine
from .progress import Bar, Clock
from .settings import Settings

RunEngine = Callable[[dict[str, Any], Path, bool, float | None], Iterator[dict[str, Any]]]
FORMAT = 1
"""Of the JSON; changes when a reader would have to"""
LOG_TAIL = 3000
"""Characters of a failed engine's log that are shown"""


def load_benchmarks(settings: Settings) -> list[dict[str, Any]]:
    """Names and prompts of the chosen benchmarks. Raises as `datasets.load` does."""
    chosen = []
    for item in settings.benchmarks:
        name, _, path = str(item).partition("=")
        chosen.append({"name": name, "prompts": load(name, path or None, settings.samples, settings.seed)})
    return chosen


def run_methods(
    settings: Settings,
    model: str,
    out: Path,
    save: Callable[[dict[str, Any]], None],
    cpu: bool,
    run: RunEngine = run_engine,
) -> dict[str, Any]:
    """Measure all methods; a method that fails is left out from then on, and Ctrl-C ends the run with what is there.

    Args:
        model: path or hub id of the target
        out: directory for the engines' logs
        save: is called with the result so far whenever an engine is through, and at the end
        cpu: whether vLLM's CPU build is installed

    Returns:
        What the JSON file holds (see docs/bench.md).
    """
    benchmarks, engines = load_benchmarks(settings), plan(settings)
    result: dict[str, Any] = {
        "format": FORMAT, "settings": _portable(settings), "interrupted": False, "machine": {},
        "engines": [], "failures": {}, "answers": [],
    }  # fmt: skip
    logs = out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    clock = Clock(_steps(engines, benchmarks, settings))
    try:
        with Bar(clock) as bar:
            for repeat in range(settings.repeats):
                for number, engine in enumerate(engines):
                    label = f"{number}-{engine.name}"
                    if label in result["failures"]:
                        continue
                    job = _job(settings, model, engine, benchmarks)
                    with closing(run(job, logs / f"{number}-{engine.method}.log", cpu, settings.timeout)) as events:
                        _collect(result, engine, label, repeat, events, bar)
                    if label in result["failures"]:
                        _forget(clock, engine, benchmarks, settings)
                    _finish(result, save)
    except KeyboardInterrupt:
        result["interrupted"] = True
    _finish(result, save)
    return result


def run_without_files(settings: Settings, model: str, cpu: bool) -> dict[str, Any]:
    """`run_methods` for whom its result is enough. What engines that failed had to say goes to standard error."""
    with tempfile.TemporaryDirectory() as directory:
        result = run_methods(settings, model, Path(directory), lambda so_far: None, cpu)
        for log in Path(directory).glob("logs/*") if result["failures"] else ():
            print(log.read_text()[-LOG_TAIL:], file=sys.stderr)
    result["failures"] = {name: why.partition("; see ")[0] for name, why in result["failures"].items()}
    return result


def _finish(result: dict[str, Any], save: Callable[[dict[str, Any]], None]) -> None:
    result["summary"] = summarize(result["answers"], result["engines"], result["settings"]["plain_tokens"])
    save(result)


def _asked(engine: Engine, benchmarks: list[dict[str, Any]], settings: Settings) -> tuple[list[dict[str, Any]], int]:
    """Prompts for a method, and the most tokens of an answer. After a plain answer that is cut short a conversation does
    not go on: its next turn would follow another text than with the other methods."""
    if engine.method != VANILLA or settings.plain_tokens is None:
        return benchmarks, settings.max_tokens
    first_turns = [{**b, "prompts": [turns[:1] for turns in b["prompts"]]} for b in benchmarks]
    return first_turns, min(settings.plain_tokens, settings.max_tokens)


def _job(settings: Settings, model: str, engine: Engine, benchmarks: list[dict[str, Any]]) -> dict[str, Any]:
    asked, max_tokens = _asked(engine, benchmarks, settings)
    return {
        "model": model,
        "speculative_config": engine.speculative_config,
        "engine": settings.engine,
        "vram": parse_size(settings.vram) if settings.vram else None,
        "variants": [asdict(v) for v in engine.variants],
        "benchmarks": asked,
        "temperatures": settings.temperature,
        "max_tokens": max_tokens,
        "seed": settings.seed,
    }


def _collect(
    result: dict[str, Any], engine: Engine, label: str, repeat: int, events: Iterator[dict[str, Any]], bar: Bar
) -> None:
    """Take what one engine process measures into the result."""
    about = {
        "repeat": repeat, "method": engine.method,
        "speculative_config": _without_directories(engine.speculative_config),
        "variants": [asdict(v) for v in engine.variants], "skipped": 0,
    }  # fmt: skip
    result["engines"].append(about)
    left_out: set[tuple[str, int]] = set()
    bar.now(f"{engine.method}, repeat {repeat + 1}: starting")
    for event in events:
        kind = event.pop("event")
        if kind == "started":
            about["start_seconds"] = event.pop("seconds")
            result["machine"] = event
            bar.step(("start", engine.method))
            bar.now(f"{engine.method}, repeat {repeat + 1}: warm-up")
        elif kind == "warm":
            bar.step(("warm", event["variant"]))
            bar.now(f"{event['variant']}, repeat {repeat + 1}: measuring")
        elif kind == "answer":
            result["answers"].append({"repeat": repeat, **event})
            bar.step(("answer", event["variant"]))
            bar.now(f"{event['variant']}, repeat {repeat + 1}: {event['benchmark']}")
        elif kind == "skipped":
            left_out.add((event["benchmark"], event["sample"]))
            about["skipped"] = len(left_out)
            bar.clock.drop(("answer", event["variant"]))
        elif kind == "done":
            about.update(event)
        else:
            result["failures"][label] = event["error"]


def _steps(engines: list[Engine], benchmarks: list[dict[str, Any]], settings: Settings) -> Counter:
    """How many steps of each kind the whole run has."""
    steps: Counter = Counter()
    for engine in engines:
        turns = sum(len(turns) for b in _asked(engine, benchmarks, settings)[0] for turns in b["prompts"])
        steps["start", engine.method] += settings.repeats
        for variant in engine.variants:
            steps["warm", variant.name] += settings.repeats
            temperatures = 1 if variant.first_only else len(settings.temperature)
            steps["answer", variant.name] += turns * temperatures * settings.repeats
    return steps


def _forget(clock: Clock, engine: Engine, benchmarks: list[dict[str, Any]], settings: Settings) -> None:
    """Nothing more comes from an engine that failed."""
    for step in _steps([engine], benchmarks, settings):
        clock.planned[step] = len(clock.seen.get(step, ()))


def _portable(settings: Settings) -> dict[str, Any]:
    """Settings without the directories of this machine: a stored result is for others."""
    values = asdict(settings)
    values["model"], values["draft"] = _name(settings.model), _name(settings.draft)
    values["benchmarks"] = [
        "=".join([b.partition("=")[0], Path(b).name]) if "=" in b else b for b in settings.benchmarks
    ]
    return values


def _without_directories(config: dict[str, Any] | None) -> dict[str, Any] | None:
    return {k: _name(v) if k == "model" else v for k, v in config.items()} if config else None


def _name(model: str | None) -> str | None:
    return Path(model).name if model and Path(model).expanduser().is_dir() else model


def default_directory() -> Path:
    """Where a run's files go if nothing is said."""
    return Path(time.strftime("bench-%Y%m%d-%H%M%S"))
