"""Figures of a run from what its engines measured. Symbols are the paper's (arXiv 2509.18344, section 4).

A pass is one forward pass of the target after the prefill. Ratios compare requests that both sides answered in the
same repeat. Times are in seconds, speeds in tokens per second, memory in GiB.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from statistics import median
from typing import Any

ALL = "all"
"""The row that pools several benchmarks"""
VANILLA = "vanilla"
Answer = dict[str, Any]
"""An ``answer`` event of `engine`, with its repeat"""


def summarize(
    answers: list[Answer], engines: list[dict[str, Any]], plain_tokens: int | None = None
) -> list[dict[str, Any]]:
    """One row for each temperature, benchmark and variant, in the order of the run.

    A figure that has a spread is ``{"median", "min", "max"}`` over repeats; one that cannot be told is None.

    Args:
        engines: of each process ``variants`` (name, tree) and ``peak_reserved_gib``
        plain_tokens: where vanilla's answers were cut short
    """
    benchmarks = list(dict.fromkeys(a["benchmark"] for a in answers))
    rows = []
    for temperature in dict.fromkeys(a["temperature"] for a in answers):
        for benchmark in benchmarks + [ALL] * (len(benchmarks) > 1):
            chosen = [a for a in answers if a["temperature"] == temperature and benchmark in (a["benchmark"], ALL)]
            for variant in dict.fromkeys(a["variant"] for a in chosen):
                row = {"benchmark": benchmark, "temperature": temperature, "method": variant}
                rows.append({**row, **_row(chosen, variant, engines, plain_tokens)})
    return rows


def _row(chosen: list[Answer], variant: str, engines: list[dict[str, Any]], plain_tokens: int | None) -> dict[str, Any]:
    vanilla = [a for a in chosen if a["variant"] == VANILLA]
    own = [a for a in chosen if a["variant"] == variant]
    tree = next((v["tree"] for e in engines for v in e["variants"] if v["name"] == variant), None)
    repeats = [_repeat(own, chosen, r, tree) for r in dict.fromkeys(a["repeat"] for a in own)]
    peaks = [e.get("peak_reserved_gib") for e in engines if variant in (v["name"] for v in e["variants"])]
    return {
        "tree": tree,
        "requests": len(own),
        **{key: spread(r[key] for r in repeats) for key in repeats[0]},
        "accepted_by_depth": acceptance_by_depth(own, tree),
        "same_as_vanilla": None if variant == VANILLA else same_as(own, vanilla, plain_tokens),
        "peak_memory_gib": max((p for p in peaks if p is not None), default=None),
    }


def _repeat(own: list[Answer], chosen: list[Answer], repeat: int, tree: list[int] | None) -> dict[str, float | None]:
    """The figures of one variant in one repeat."""
    own = [a for a in own if a["repeat"] == repeat]
    vanilla = {_request(a): a for a in chosen if a["variant"] == VANILLA and a["repeat"] == repeat}
    both = [a for a in own if _request(a) in vanilla]
    plain = [vanilla[_request(a)] for a in both]
    tau = acceptance_length(own)
    t_target = pass_seconds(plain)
    rounds = phases(own, tree)
    speedup = _ratio(decode_speed(both), decode_speed(plain))
    return {
        "decode_speed": decode_speed(own),
        "end_to_end_speed": _ratio(sum(len(a["tokens"]) for a in own), sum(a["seconds"] for a in own)),
        "first_token": median(a["first_token_seconds"] for a in own),
        "pass": pass_seconds(own),
        "tau": tau,
        "speedup": speedup,
        "eta": _ratio(speedup, tau),
        "t_target": t_target,
        "gamma": _ratio(rounds["verify"], t_target),
        # The paper's tau / (D t_draft / t_target + gamma), with D t_draft and gamma t_target as measured per round
        "formula_speedup": tau * t_target / (rounds["draft"] + rounds["verify"])
        if t_target and rounds["draft"]
        else None,
        **rounds,
    }


def _request(a: Answer) -> tuple:
    return a["benchmark"], a["sample"], a["turn"]


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def passes(a: Answer) -> int:
    """Target passes after the prefill."""
    return len(a["emitted"]) - 1


def decode_seconds(answers: Iterable[Answer]) -> float:
    """Seconds from each request's first token to its last."""
    return sum(a["seconds"] - a["first_token_seconds"] for a in answers)


def decode_speed(answers: list[Answer]) -> float | None:
    """Tokens per second after the prefill."""
    return _ratio(sum(sum(a["emitted"][1:]) for a in answers), decode_seconds(answers))


def pass_seconds(answers: list[Answer]) -> float | None:
    """Mean seconds from one pass to the next, drafts included."""
    return _ratio(decode_seconds(answers), sum(passes(a) for a in answers))


def pass_tokens(a: Answer, until: int | None = None) -> list[int]:
    """Tokens of each pass, the bonus token included and the last pass counted whole, also where the answer ended inside
    it.

    Args:
        until: only the passes that it takes to have so many tokens, the prefill's one included. Asked of an answer that
            was allowed more, none of their trees was made smaller for its end: so is tau counted without an engine.
    """
    counts = [n + 1 for n in a["rounds"]["accepted"]] if a["rounds"] else a["emitted"][1:]
    if "accepted_tokens" in a["counters"] and not a["rounds"]:  # vLLM's own methods: what was sent of the last is less
        counts = [*counts[:-1], a["counters"]["accepted_tokens"] + len(counts) - sum(counts[:-1])]
    if until is None:
        return counts
    return [n for n, before in zip(counts, accumulate(counts, initial=1)) if before < until]


def acceptance_length(answers: list[Answer], until: int | None = None) -> float | None:
    """tau: tokens per target pass, as `pass_tokens` counts them."""
    counts = [n for a in answers for n in pass_tokens(a, until)]
    return sum(counts) / len(counts) if counts else None


def acceptance_by_depth(answers: list[Answer], tree: list[int] | None) -> list[float]:
    """Share of drafts whose first d tokens were accepted, for d = 1, 2, ...; of drafts that reach so deep."""
    if tree is None:
        drafts = sum(a["counters"].get("drafts", 0) for a in answers)
        keys = {k for a in answers for k in a["counters"] if k.startswith("accepted_per_pos:")}
        totals = [sum(a["counters"].get(f"accepted_per_pos:{i}", 0) for a in answers) for i in range(len(keys))]
        return [total / drafts for total in totals] if drafts else []
    rounds = [pair for a in answers if a["rounds"] for pair in zip(_depths(a, tree), a["rounds"]["accepted"])]
    rates = []
    for depth in range(1, tree[1] + 1):
        deep = [count for reached, count in rounds if reached >= depth]
        if not deep:
            break
        rates.append(sum(count >= depth for count in deep) / len(deep))
    return rates


def _depths(a: Answer, tree: list[int]) -> list[int]:
    """Levels of each round's tree; near an answer's end a tree is shallower than D."""
    return [-(-(size - 1) // tree[0]) for size in a["rounds"]["tree_size"]]


def phases(answers: list[Answer], tree: list[int] | None) -> dict[str, float | None]:
    """Mean seconds of a round's draft and verification, of one draft pass, and the phases' shares of decoding.

    Where the waits for streamed weights were timed they are a phase of their own, and not of the verification. vLLM's
    own methods do not tell their phases apart.
    """
    drafting = [a for a in answers if a["rounds"]]
    if tree is None or not drafting:
        keys = ("draft", "verify", "t_draft", "draft_share", "verify_share", "wait_share", "other_share")
        return dict.fromkeys(keys)
    draft = sum(sum(a["rounds"]["draft_seconds"]) for a in drafting)
    verify = sum(sum(a["rounds"]["verify_seconds"]) for a in drafting)
    timed = [wait for a in drafting for wait in a["rounds"].get("wait_seconds", ()) if wait is not None]
    wait = sum(timed)
    count, levels = sum(passes(a) for a in drafting), sum(sum(_depths(a, tree)) for a in drafting)
    whole = decode_seconds(drafting)
    return {
        "draft": draft / count,
        "verify": verify / count,
        "t_draft": _ratio(draft, levels),
        "draft_share": draft / whole,
        "verify_share": (verify - wait) / whole,
        "wait_share": wait / whole if timed else None,
        "other_share": max(0.0, 1 - (draft + verify) / whole),
    }


def same_as(own: list[Answer], vanilla: list[Answer], plain_tokens: int | None = None) -> float | None:
    """Share of greedy answers that are token for token those of plain vLLM, up to where these were cut short."""
    expected = {(a["repeat"], *_request(a)): a["tokens"] for a in vanilla}
    pairs = [(a["tokens"], expected.get((a["repeat"], *_request(a)))) for a in own if a["temperature"] == 0]
    compared = [got[:plain_tokens] == wanted[:plain_tokens] for got, wanted in pairs if wanted is not None]
    return sum(compared) / len(compared) if compared else None


def pooled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of several benchmarks the rows that pool them."""
    return [r for r in rows if r["benchmark"] == ALL] or rows


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Median and range of what the repeats gave."""
    known = [v for v in values if v is not None]
    return {"median": median(known), "min": min(known), "max": max(known)} if known else None


def middle(row: dict[str, Any], key: str) -> float | None:
    """The median of a row's figure; of a kept one (see `report.without_requests`) the figure."""
    value = row.get(key)
    return value["median"] if isinstance(value, dict) else value
