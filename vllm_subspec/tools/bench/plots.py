"""A run as images. Each function draws one figure, or none where the run has nothing for it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .measure import ALL, VANILLA, middle

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
        pooled = [r for r in rows if r["benchmark"] == ALL] or rows
        for draw, chosen in (
            (speed, rows), (tau_histogram, pooled), (acceptance, pooled), (shares, pooled), (formula, rows),
        ):  # fmt: skip
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
            at, value = benchmarks.index(r["benchmark"]) + (i - (len(methods) - 1) / 2) * width, r["decode_speed"]
            error = [[value["median"] - value["min"]], [value["max"] - value["median"]]]
            axes.bar(at, value["median"], width * 0.95, yerr=error, capsize=2, color=colors[method],
                     error_kw={"elinewidth": 0.8})  # fmt: skip
            if (ratio := middle(r, "speedup")) is not None and method != VANILLA:
                axes.annotate(f"{ratio:.2f}x", (at, value["max"]), xytext=(0, 5), textcoords="offset points",
                              ha="center", fontsize=7, rotation=90 if width < 0.2 else 0)  # fmt: skip
        axes.bar(0, 0, color=colors[method], label=method)
    axes.set_xticks(range(len(benchmarks)), benchmarks)
    axes.set_ylabel("tokens/s (decoding)")
    axes.margins(y=0.12)
    _clean(axes)
    _legend(figure, axes)
    figure.suptitle("Speed by method (numbers: speedup over vanilla)")
    return True


def tau_histogram(figure: Figure, rows: Rows, colors: Colors) -> bool:
    """How many tokens a pass emits, by method."""
    rows = [r for r in rows if r["method"] != VANILLA and r["pass_tokens"]]
    if not rows:
        return False
    longest = max(int(n) for r in rows for n in r["pass_tokens"])
    columns = 1 if len(rows) <= 5 else 2
    lines = -(-len(rows) // columns)
    figure.set_size_inches(2 + 5 * columns, 1.0 + 1.5 * lines)
    grid = figure.subplots(lines, columns, sharex=True, squeeze=False)
    for axes in grid.flat[len(rows) :]:
        axes.set_visible(False)
    for axes, r in zip(grid.flat, rows):
        total = sum(r["pass_tokens"].values())
        axes.bar([int(n) for n in r["pass_tokens"]], [c / total for c in r["pass_tokens"].values()], 0.9,
                 color=colors[r["method"]])  # fmt: skip
        axes.axvline(middle(r, "tau"), color="black", linewidth=1, linestyle="--")
        axes.set_title(f"{r['method']}: tau {middle(r, 'tau'):.2f} (dashed), {total} passes", fontsize=9, loc="left")
        axes.set_ylabel("share of\npasses", fontsize=8)
        axes.set_xlim(0.3, longest + 0.7)
        _clean(axes)
    figure.supxlabel("tokens a pass emits (accepted and bonus)", fontsize=10)
    figure.suptitle("Tokens per target pass")
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


def formula(figure: Figure, rows: Rows, colors: Colors) -> bool:
    """Measured speedup against tau / (D t_draft / t_target + gamma)."""
    rows = [r for r in rows if r["benchmark"] != ALL and r["formula_speedup"] and r["speedup"]]
    if not rows:
        return False
    figure.set_size_inches(6.2, 5.2 + 0.1 * len(_methods(rows)))
    axes, markers = figure.add_subplot(), "osD^vP*Xh"
    benchmarks = list(dict.fromkeys(r["benchmark"] for r in rows))
    for r in rows:
        marker = markers[benchmarks.index(r["benchmark"]) % len(markers)]
        axes.plot(middle(r, "formula_speedup"), middle(r, "speedup"), color=colors[r["method"]], linestyle="",
                  marker=marker, markersize=7, alpha=0.85)  # fmt: skip
    for method in _methods(rows):
        axes.plot([], [], color=colors[method], linestyle="", marker="s", label=method)
    for i, benchmark in enumerate(benchmarks):
        axes.plot([], [], color="0.4", linestyle="", marker=markers[i % len(markers)], label=benchmark)
    top = 1.1 * max(max(middle(r, "formula_speedup"), middle(r, "speedup")) for r in rows)
    axes.plot([0, top], [0, top], color="0.5", linewidth=0.8)
    axes.set(xlabel="formula", ylabel="measured", xlim=(0, top), ylim=(0, top), aspect="equal")
    _clean(axes)
    axes.grid(axis="x", color="0.9")
    _legend(figure, axes)
    figure.suptitle("Speedup, measured against formula")
    return True
