"""``vllm-subspec trace``: one prompt, every round's tree."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from . import trace_html, trace_text
from .engine import one_sentence
from .settings import check_model, parse_pairs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    add = parser.add_argument
    add("--prompt", required=True, help="a user message")
    add("--model", help="local path or hub id; default: SmolLM2-135M-Instruct")
    add("--max-tokens", type=int, default=64)
    add("--subspec", nargs="+", metavar="KEY=VALUE", help="options of method subspec, as tree_depth=16")
    add("--engine", nargs="+", metavar="KEY=VALUE", help="arguments of vllm.LLM: the offload flags, dtype, ...")
    add("--html", metavar="FILE", help="also write a page with a drawing of each tree")


def run_trace(args: argparse.Namespace) -> int:
    """Answer the prompt greedily and print every round.

    Raises:
        ValueError, FileNotFoundError: bad input, or an engine that does not start; one sentence.
    """
    from ..generate import generate, start_engine, stop_engine
    from ..smollm2 import ensure_smollm2

    spec = {"method": "subspec", **(parse_pairs(args.subspec, "--subspec") or {})}
    given = parse_pairs(args.engine, "--engine") or {}
    if args.model is not None:
        check_model(args.model)
    if args.html is not None and not Path(args.html).absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no directory for {args.html}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    arguments = {"max_model_len": 2048, "max_num_seqs": 1, "enforce_eager": True, **given}
    try:
        llm = start_engine(args.model or str(ensure_smollm2()), spec, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(one_sentence(error)) from None
    try:
        tokenizer = llm.get_tokenizer()
        llm.collective_rpc("subspec_trace", args=(True,))
        answer = generate(llm, args.prompt, args.max_tokens, speculative=True)
        (rounds,) = llm.collective_rpc("subspec_trace", args=(False,))
    finally:
        stop_engine(llm)
    decode = lambda token: tokenizer.decode([token])  # noqa: E731
    print(f"{trace_text.render(rounds, decode)}\n\n{answer.text}")
    if args.html is not None:
        Path(args.html).write_text(trace_html.page(rounds, decode, args.prompt, answer.text))
        print(f"\nwritten to {args.html}")
    return 0
