"""A run as tables: in the terminal and in Markdown; and as JSON, from which both can be made again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .measure import VANILLA, pooled, summarize

NOTES = (
    "Speeds are medians over repeats (range in brackets). tok/s counts decoding only, end to end the prefill as well. "
    "Speedup compares decoding with vanilla on the same requests of the same repeat. eta is speedup / tau. "
    "formula is tau / (D t_draft / t_target + gamma).",
    "transfer wait is what verifications waited for streamed weights, outside captured CUDA graphs; where it was not "
    "timed it is part of verify. vLLM's own speculative methods do not tell their draft from their verification.",
)
DEPTHS = (1, 4, 16)
"""Where the tables show acceptance; the plot shows every depth"""


@dataclass
class Table:
    """Cells as text; the first two columns name the row."""

    title: str
    header: list[str]
    rows: list[list[str]]


def _cell(row: dict[str, Any], key: str, form: str = ".2f", scale: float = 1.0, ranged: bool = False) -> str:
    value = row.get(key)
    if value is None:
        return "-"
    if not isinstance(value, dict):
        return f"{value * scale:{form}}"
    text = f"{value['median'] * scale:{form}}"
    if ranged and value["max"] > value["min"]:
        text += f" ({value['min'] * scale:{form}}-{value['max'] * scale:{form}})"
    return text


def tables(summary: list[dict[str, Any]]) -> list[Table]:
    """Two tables a temperature: what a user sees, and what a round consists of."""
    made = []
    for temperature in dict.fromkeys(r["temperature"] for r in summary):
        rows = [r for r in summary if r["temperature"] == temperature]
        made.append(Table(f"Speed, temperature {temperature:g}",
            ["benchmark", "method", "tok/s", "end to end", "first token ms", "tau", "speedup", "eta", "same text",
             "GPU GiB"],
            [[r["benchmark"], r["method"], _cell(r, "decode_speed", ranged=True), _cell(r, "end_to_end_speed"),
              _cell(r, "first_token", ".0f", 1e3), _cell(r, "tau"), _cell(r, "speedup", ranged=True), _cell(r, "eta"),
              _cell(r, "same_as_vanilla", ".0%"), _cell(r, "peak_memory_gib")] for r in rows],
        ))  # fmt: skip
        made.append(Table(f"Passes, temperature {temperature:g}",
            ["benchmark", "method", "pass ms", "t_target ms", "t_draft ms", "gamma", "formula", "draft", "verify",
             "transfer wait", "other", *(f"accepted at {depth}" for depth in DEPTHS)],
            [[r["benchmark"], r["method"], _cell(r, "pass", ".1f", 1e3), _cell(r, "t_target", ".1f", 1e3),
              _cell(r, "t_draft", ".2f", 1e3), _cell(r, "gamma"), _cell(r, "formula_speedup"),
              _cell(r, "draft_share", ".0%"), _cell(r, "verify_share", ".0%"), _cell(r, "wait_share", ".0%"),
              _cell(r, "other_share", ".0%"),
              *(_at(r["accepted_by_depth"], depth) for depth in DEPTHS)] for r in rows if r["method"] != VANILLA],
        ))  # fmt: skip
    return [table for table in made if table.rows]


def _at(rates: list[float], depth: int) -> str:
    return f"{rates[depth - 1]:.2f}" if depth <= len(rates) else "-"


def remarks(result: dict[str, Any]) -> list[str]:
    """What the tables do not say: methods without (all of) their results, prompts left out, a device that misleads."""
    lines = [f"{label.partition('-')[2]} stopped: {why}" for label, why in result["failures"].items()]
    skipped = max((e["skipped"] for e in result["engines"]), default=0)
    if skipped:
        lines.append(f"{skipped} prompts do not fit the model's context (engine max_model_len) and were left out")
    if result["interrupted"]:
        lines.append("interrupted: only what was finished by then counts")
    if result["settings"].get("ablate") and not _streams_ahead(result):
        lines.append("nothing is transferred ahead here (no prefetch offloading): steps 3 and 4 are the same engine")
    if result["summary"] and result["machine"].get("device", "").startswith("CPU"):
        lines.append(
            "on a CPU nothing is offloaded and vLLM's GPU runner is interpreted: ratios to vanilla are no GPU's"
        )
        if any(e["method"] not in (VANILLA, "subspec") for e in result["engines"]):
            lines.append(
                "on a CPU vLLM warns that its own speculative methods are slow without Intel OpenMP in LD_PRELOAD"
            )
    return lines


def _streams_ahead(result: dict[str, Any]) -> bool:
    """Whether vLLM's prefetch backend overlapped transfers with computing."""
    engine = result["settings"]["engine"]
    prefetch = engine.get("offload_group_size", 0) > 0 and engine.get("offload_backend") != "uva"
    return prefetch and not result["machine"].get("device", "").startswith("CPU")


def print_report(result: dict[str, Any], console: Any) -> None:
    """The tables in the terminal; ``console`` is rich's."""
    from rich.console import Console

    shown = [_rich(table) for table in tables(result["summary"])]
    # As wide as they are, also where the terminal is narrower or unknown: cut cells are worth nothing.
    unbounded = console.options.update(max_width=1000)
    needed = max((console.measure(table, options=unbounded).maximum for table in shown), default=0)
    wide = Console(width=max(console.width, needed), file=console.file)
    for table in shown:
        wide.print(table)
    for line in remarks(result):
        console.print(line, style="bold", markup=False, soft_wrap=True)


def _rich(table: Table) -> Any:
    from rich.table import Table as RichTable

    shown = RichTable(title=table.title)
    for i, name in enumerate(table.header):
        shown.add_column(name.replace(" ", "\n", 1), justify="left" if i < 2 else "right", no_wrap=True)
    for before, row in zip([None, *table.rows], table.rows):
        if before is not None and before[0] != row[0]:
            shown.add_section()
        shown.add_row(*row)
    return shown


def markdown(result: dict[str, Any], plots: list[str]) -> str:
    """The report as Markdown.

    Args:
        plots: file names of images beside it
    """
    settings, machine = result["settings"], result["machine"]
    lines = [f"# {settings['model']}: {', '.join(settings['methods'])}", ""]
    lines += [f"{machine.get('device', 'unknown device')}; " + ", ".join(
        f"{name} {version}" for name, version in machine.get("versions", {}).items()
    ), ""]  # fmt: skip
    for table in tables(result["summary"]):
        lines += [f"## {table.title}", "", "| " + " | ".join(table.header) + " |"]
        lines.append("|" + "|".join(["---"] * 2 + ["---:"] * (len(table.header) - 2)) + "|")
        lines += ["| " + " | ".join(row) + " |" for row in table.rows] + [""]
    lines += [f"- {line}" for line in remarks(result)] + [""] * bool(remarks(result))
    lines += [line for note in NOTES for line in (note, "")]
    lines += [f"![{Path(name).stem}]({name})" for name in plots] + [""] * bool(plots)
    lines += ["Command:", "", "```", result["command"], "```", ""]
    if result.get("yaml"):
        lines += ["The YAML file that it names:", "", "```yaml", result["yaml"].rstrip(), "```", ""]
    return "\n".join(lines)


def write(result: dict[str, Any], out: Path) -> None:
    """``results.json`` and ``results.md`` in ``out``; plots that are already there are shown."""
    (out / "results.json").write_text(as_json(result))
    (out / "results.md").write_text(markdown(result, sorted(p.name for p in out.glob("*.png"))))


def as_json(result: dict[str, Any]) -> str:
    """A line for each key, and for each engine, row and answer: there are many."""
    lines = []
    for key, value in result.items():
        rows = ",\n".join(map(json.dumps, value)) if key in ("engines", "summary", "answers") else None
        lines.append(f'"{key}": ' + (json.dumps(value) if rows is None else f"[\n{rows}\n]"))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _plain(value: Any) -> Any:
    return value["median"] if isinstance(value, dict) and value["min"] == value["max"] else value


def without_requests(result: dict[str, Any]) -> dict[str, Any]:
    """A result of a few kilobytes, to keep: no answers, of several benchmarks only the rows that pool them, four digits
    of each figure, and one number where the repeats have no spread."""
    rows = json.dumps([{key: _plain(value) for key, value in row.items()} for row in pooled(result["summary"])])
    rounded = json.loads(rows, parse_float=lambda digits: float(f"{float(digits):.4g}"))
    return {**{key: value for key, value in result.items() if key != "answers"}, "summary": rounded}


def read(path: Path) -> dict[str, Any]:
    """A stored result, its summary made again from the answers where it has them.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is something else.
    """
    from .run import FORMAT

    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        result = json.loads(path.read_text())
    except ValueError:
        result = None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise ValueError(f"{path} is no result of vllm-subspec bench")
    if "answers" in result:
        plain_tokens = result["settings"].get("plain_tokens")
        result["summary"] = summarize(result["answers"], result["engines"], plain_tokens)
    return result
