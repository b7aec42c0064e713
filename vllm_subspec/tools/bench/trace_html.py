"""Traced rounds as one HTML page that needs nothing else: a drawing of each round's tree."""

from __future__ import annotations

from html import escape
from typing import Any

from .trace_text import Decode, headline, probability

COLUMN, ROW, BOX, HEIGHT, MARGIN = 110, 26, 84, 20, 12
"""Distance of levels, distance of nodes in a level, a node's width and height, border; in pixels"""
LABEL = 11
"""Letters of a token that fit into a node"""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c2733; }
h1 { font-size: 1.4rem; } details { border-top: 1px solid #d5dde5; padding: .5rem 0; } summary { cursor: pointer; }
.scroll { overflow-x: auto; } .prompt, .answer { white-space: pre-wrap; background: #f3f6f9; padding: .6rem .8rem; }
svg text { font: 11px ui-monospace, monospace; } svg .level { fill: #7a8794; }
rect { fill: #fff; stroke: #b6c2cd; } .accepted rect { fill: #cdeed3; stroke: #2f8f46; }
.target rect { fill: #ffe3b8; stroke: #c77800; }
line { stroke: #c8d2db; } line.accepted { stroke: #2f8f46; stroke-width: 2; }
.key { padding: 0 .4rem; border: 1px solid; } .key.accepted { background: #cdeed3; border-color: #2f8f46; }
.key.target { background: #ffe3b8; border-color: #c77800; } .key.draft { border-color: #b6c2cd; }
"""


def page(rounds: list[dict[str, Any]], decode: Decode, prompt: str, answer: str) -> str:
    """The page. All text of prompt, answer and tokens is escaped.

    Args:
        rounds: dictionaries of `vllm_subspec.engine.trace.TracedRound`
    """
    accepted = sum(len(r["path"]) for r in rounds)
    figures = f"{len(rounds)} rounds, {accepted} tokens, tau {accepted / len(rounds):.2f}" if rounds else "no rounds"
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>SubSpec trace</title><style>{STYLE}</style></head><body>',
        f"<h1>SubSpec, round by round</h1><p>{escape(figures)}</p>",
        f'<p class="prompt">{escape(prompt)}</p><p class="answer">{escape(answer)}</p>',
        '<p><span class="key accepted">accepted</span> <span class="key draft">drafted only</span> '
        '<span class="key target">chosen by the target instead</span>. Numbers are the draft\'s probabilities after '
        "the parent, at the draft temperature. Hover over a node for the target's own choice after it.</p>",
    ]
    for number, traced in enumerate(rounds, 1):
        opened = " open" if number == 1 else ""
        parts.append(f"<details{opened}><summary>Round {number}: {escape(headline(traced))}</summary>")
        parts.append(f'<div class="scroll">{tree_svg(traced, decode)}</div></details>')
    return "\n".join([*parts, "</body></html>", ""])


def tree_svg(traced: dict[str, Any], decode: Decode) -> str:
    """One round: a column a level, the accepted path in the top row, the rest by the draft's score."""
    places, path = _places(traced), set(traced["path"])
    end = traced["path"][-1]
    bonus = (traced["depths"][end] + 1, 0)
    columns = max([bonus[0], *(column for column, _ in places)]) + 1
    rows = max(row for _, row in places) + 1
    lines, boxes = [], []
    for level in range(columns):
        lines.append(
            f'<text class="level" x="{_x(level) + BOX / 2}" y="{MARGIN}" text-anchor="middle">{level or "root"}</text>'
        )
    for node, place in enumerate(places):
        inside = node in path
        if node:
            lines.append(_edge(places[traced["parents"][node]], place, inside))
        hint = f"{decode(traced['tokens'][node])!r}; the target goes on with {decode(traced['target_tokens'][node])!r} "
        hint += f"({traced['target_probs'][node]:.2f})"
        share = f" {probability(traced, node):.2f}" if node else ""
        boxes.append(_box(place, decode(traced["tokens"][node]), share, "accepted" if inside else "draft", hint))
    lines.append(_edge(places[end], bonus, True))
    boxes.append(
        _box(bonus, decode(traced["bonus"]), "", "target", f"{decode(traced['bonus'])!r}, chosen by the target")
    )
    size = f'width="{_x(columns) + MARGIN}" height="{_y(rows) + MARGIN}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *lines, *boxes, "</svg>"])


def _places(traced: dict[str, Any]) -> list[tuple[int, int]]:
    """Column and row of each node. Row 0 is the accepted path's; where it has ended, the target's choice takes it."""
    scores, path, next_row, places = [0.0], set(traced["path"]), {}, {}
    for node in range(1, len(traced["tokens"])):
        scores.append(scores[traced["parents"][node]] + traced["draft_logprobs"][node])
    for node in sorted(range(len(scores)), key=lambda i: -scores[i]):
        depth = traced["depths"][node]
        if node in path:
            places[node] = (depth, 0)
        else:
            next_row[depth] = next_row.get(depth, 0) + 1
            places[node] = (depth, next_row[depth])
    return [places[node] for node in range(len(scores))]


def _x(column: int) -> int:
    return MARGIN + column * COLUMN


def _y(row: int) -> int:
    return 2 * MARGIN + row * ROW


def _edge(parent: tuple[int, int], child: tuple[int, int], accepted: bool) -> str:
    ends = f'x1="{_x(parent[0]) + BOX}" y1="{_y(parent[1]) + HEIGHT / 2}" '
    ends += f'x2="{_x(child[0])}" y2="{_y(child[1]) + HEIGHT / 2}"'
    kind = ' class="accepted"' if accepted else ""
    return f"<line {ends}{kind}/>"


def _box(place: tuple[int, int], token: str, share: str, kind: str, hint: str) -> str:
    visible = token.replace(" ", "\u00b7").encode("unicode_escape").decode() if not token.isprintable() else token
    visible = visible.replace(" ", "\u00b7")
    room = LABEL - len(share) + 1
    text = (visible if len(visible) <= room else visible[: room - 1] + "\u2026") + share
    x, y = _x(place[0]), _y(place[1])
    return (
        f'<g class="{kind}"><title>{escape(hint)}</title><rect x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="3"/>'
        f'<text x="{x + BOX / 2}" y="{y + HEIGHT - 6}" text-anchor="middle">{escape(text)}</text></g>'
    )
