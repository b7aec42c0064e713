"""Traced rounds as text: the accepted path, beside it what else the draft had, at its end what the target chose."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

SIBLINGS = 3
"""Other children of a path node that are shown"""

Decode = Callable[[int], str]
"""Text of one token"""


def children(traced: dict[str, Any], node: int) -> list[int]:
    """Children of a node, likeliest first."""
    found = [i for i in range(1, len(traced["tokens"])) if traced["parents"][i] == node]
    return sorted(found, key=lambda i: -traced["draft_logprobs"][i])


def probability(traced: dict[str, Any], node: int) -> float:
    """The draft's probability of a node after its parent, at the draft temperature."""
    return math.exp(traced["draft_logprobs"][node])


def headline(traced: dict[str, Any]) -> str:
    """One line on a round."""
    size, depth, accepted = len(traced["tokens"]), max(traced["depths"]), len(traced["path"]) - 1
    return f"{size} nodes, {depth} levels, {accepted} accepted, {accepted + 1} tokens emitted"


def render(rounds: list[dict[str, Any]], decode: Decode) -> str:
    """All rounds as plain text.

    Args:
        rounds: dictionaries of `vllm_subspec.engine.trace.TracedRound`
    """
    return "\n\n".join(
        "\n".join([f"round {number}: {headline(traced)}", *_lines(traced, decode)])
        for number, traced in enumerate(rounds, 1)
    )


def _lines(traced: dict[str, Any], decode: Decode) -> list[str]:
    path, tokens = traced["path"], traced["tokens"]
    lines = [f"{'root':>5}   {decode(tokens[0])!r}"]
    for depth, (parent, node) in enumerate(zip(path, path[1:]), 1):
        others = [i for i in children(traced, parent) if i != node]
        line = f"{depth:>5} + {decode(tokens[node])!r:<16} {probability(traced, node):4.2f}"
        lines.append(f"{line}   also {_list(traced, others, decode)}" if others else line)
    end, chosen = path[-1], decode(traced["bonus"])
    drafted = children(traced, end)
    # The probability is of the target's likeliest token, which a sampled request need not take.
    prob = f"{traced['target_probs'][end]:4.2f}" if traced["bonus"] == traced["target_tokens"][end] else "    "
    lines.append(f"{'target':>5}{chosen!r:>{len(repr(chosen)) + 2}}".ljust(25) + f" {prob}")
    lines[-1] += f"   the draft had {_list(traced, drafted, decode)}" if drafted else "   the draft had nothing here"
    return lines


def _list(traced: dict[str, Any], nodes: list[int], decode: Decode) -> str:
    shown = [f"{decode(traced['tokens'][i])!r} {probability(traced, i):.2f}" for i in nodes[:SIBLINGS]]
    return ", ".join(shown + [f"and {len(nodes) - SIBLINGS} more"] * (len(nodes) > SIBLINGS))
