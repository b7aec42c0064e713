"""A run as images. Each function draws one figure, or none where the run has nothing for it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .measure import VANILLA, middle, pooled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = list[dict[str, Any]]
Colors = dict[str, Any]
DPI = 130
LEGEND_INCHES = 2.3
"""Width of a legend's column: the longest names are those of the ablation's steps"""


def draw_all(summary: Rows, out: Path) -> list[str]:
    """Write the PNG files of one run into ``out``; returns their names."""
    from matplotlib.figure import Figure

    names = []
    for temperature in dict.fromkeys(r["temperature"] for r in summary):
        rows = [r for r in summary if r["temperature"] == temperature]
        for draw, chosen in ((speed, rows), (acceptance, pooled(rows)), (shares, pooled(rows))):
            figure = Figure(layout="constrained", dpi=DPI)
            if draw(figure, chosen, _colors(summary)):
                figure.suptitle(f"{figure.get_suptitle()}, temperature {temperature:g}", fontsize=11)
                name = f"{draw.__name__}-t{temperature:g}.png"
                figure.savefig(out / name)
                names.append(name)
    return names


def _methods(rows: Rows) -> list[str]:
    return list(dict.fromkeys(r["method"] for r in rows))


def _colors(rows: Rows) -> Colors:
    """vanilla grey, the others of one palette; a method has the same color in all figures."""
    from matplotlib import colormaps

    others = [m for m in _methods(rows) if m != VANILLA]
    palette = colormaps["tab10" if len(others) <= 10 else "viridis"]
    shade = (lambda i: palette(i)) if len(others) <= 10 else (lambda i: palette(i / (len(others) - 1)))
    return {VANILLA: "0.6", **{m: shade(i) for i, m in enumerate(others)}}


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="0.9")


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), int(figure.get_figwidth() // LEGEND_INCHES)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def speed(figure: Figure, rows: Rows, colors: Colors) -> bool:
    """Tokens per second by benchmark and method, with the range of the repeats."""
    methods, benchmarks = _methods(rows), list(dict.fromkeys(r["benchmark"] for r in rows))
    figure.set_size_inches(max(6.0, 1.0 + 0.28 * (len(methods) + 1) * len(benchmarks)), 4.2)
    axes, width = figure.add_subplot(), 0.8 / len(methods)
    for i, method in enumerate(methods):
        for r in rows:
            if r["method"] != method or r["decode_speed"] is None:
                continue
            at = benchmarks.index(r["benchmark"]) + (i - (len(methods) - 1) / 2) * width
            value, spread = middle(r, "decode_speed"), r["decode_speed"]
            low, high = (spread["min"], spread["max"]) if isinstance(spread, dict) else (value, value)
            axes.bar(at, value, width * 0.95, color=colors[method])
            axes.vlines(at, low, high, color="black", linewidth=0.8)
            if (ratio := middle(r, "speedup")) is not None and method != VANILLA:
                axes.annotate(f"{ratio:.2f}x", (at, high), xytext=(0, 5), textcoords="offset points",
                              ha="center", fontsize=7, rotation=90 if width < 0.2 else 0)  # fmt: skip
        axes.bar(0, 0, color=colors[method], label=method)
    axes.set_xticks(range(len(benchmarks)), benchmarks)
    axes.set_ylabel("tokens/s (decoding)")
    axes.margins(y=0.12)
    _clean(axes)
    _legend(figure, axes)
    figure.suptitle("Speed by method (numbers: speedup over vanilla)")
    return True


def acceptance(figure: Figure, rows: Rows, colors: Colors) -> bool:
    """Share of drafts accepted to depth d and beyond."""
    rows = [r for r in rows if r["accepted_by_depth"]]
    if not rows:
        return False
    figure.set_size_inches(7, 4.2)
    axes = figure.add_subplot()
    for r in rows:
        rates = r["accepted_by_depth"]
        axes.plot(
            range(1, len(rates) + 1), rates, marker="o", markersize=3, color=colors[r["method"]], label=r["method"]
        )
    axes.set(xlabel="depth d", ylabel="share of drafts with d or more accepted", ylim=(0, 1.02))
    axes.set_xlim(left=0.5)
    _clean(axes)
    _legend(figure, axes)
    figure.suptitle("Acceptance by depth")
    return True


def shares(figure: Figure, rows: Rows, colors: Colors) -> bool:
    """Where the time of decoding goes, against tree depth where a sweep has several."""
    rows = sorted(
        (r for r in rows if r["draft_share"] is not None and r["tree"]), key=lambda r: (r["tree"][0], r["tree"][1])
    )
    if not rows:
        return False
    figure.set_size_inches(max(5.0, 2.0 + 0.9 * len(rows)), 4.2)
    axes, floor = figure.add_subplot(), [0.0] * len(rows)
    phases = {
        "draft": ("draft", "tab:blue"), "verify": ("verify", "tab:orange"), "wait": ("transfer wait", "tab:red"),
        "other": ("other", "0.75"),
    }  # fmt: skip
    for phase, (label, color) in phases.items():
        heights = [middle(r, f"{phase}_share") or 0.0 for r in rows]
        if phase == "wait" and not any(heights):
            continue  # nothing streams, or the waits were not timed
        axes.bar(range(len(rows)), heights, 0.7, bottom=floor, color=color, label=label)
        for i, height in enumerate(heights):
            if height > 0.06:
                axes.text(i, floor[i] + height / 2, f"{height:.0%}", ha="center", va="center", fontsize=8)
        floor = [a + b for a, b in zip(floor, heights)]
    shapes = ("tree=", "depth=", "width=")
    extra = [" ".join(part for part in r["method"].split()[1:] if not part.startswith(shapes)) for r in rows]
    lines = [textwrap.fill(e.replace("=", " "), 12) for e in extra]
    names = [f"{r['tree'][0]} x {r['tree'][1]}\n{line}".strip() for r, line in zip(rows, lines)]
    axes.set_xticks(range(len(rows)), names, fontsize=9)
    axes.set(xlabel="tree width x depth", ylabel="share of decoding time", ylim=(0, 1))
    _clean(axes)
    _legend(figure, axes)
    figure.suptitle("Time in draft and verification")
    return True
