"""Plain vLLM against subspec on an offloaded model: one machine, one run, the same offload flags.

    python examples/offload.py MODEL --out results.json [--sweep 6x16,16x32] [-- options of LLM as key=value]

Greedy, batch 1, the six prompts of `vllm_subspec.tools.prompts`, trees of full depth. Each method runs in an engine process
of its own. The JSON holds the command, the versions, the GPU, and per method tokens/s, acceptance length (tau), t_draft
(one draft pass), t_target (one plain decoding pass), the verification pass, gamma = verification / t_target, speedup
and eta = speedup / tau, peak GPU memory and start-up time; and every place where the two texts part, with the
probabilities that plain vLLM gave to both tokens there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from vllm_subspec.cpu.platform import is_cpu_build
from vllm_subspec.tools.bench.command import portable
from vllm_subspec.tools.bench.methods import parse_tree
from vllm_subspec.tools.bench.process import run_engine
from vllm_subspec.tools.bench.settings import parse_pairs
from vllm_subspec.tools.prompts import PROMPTS


def run(job: dict, timeout: int) -> dict:
    """Measure the six prompts in an engine process; trees that were through after ``timeout`` seconds count."""
    job = {
        **job, "vram": None, "seed": 0, "temperatures": [0.0],
        "benchmarks": [{"name": "six prompts", "prompts": [[prompt] for prompt in PROMPTS]}],
    }  # fmt: skip
    result: dict = {"runs": {variant["name"]: [] for variant in job["variants"]}}
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        for event in run_engine(job, log, is_cpu_build(), timeout):
            kind = event.pop("event")
            if kind == "started":
                result["start_seconds"] = event.pop("seconds")
                result["machine"] = event
            elif kind == "answer":
                answers = result["runs"][event["variant"]]
                answers.append(event)
                if len(answers) == len(PROMPTS):
                    speed = sum(len(a["tokens"]) for a in answers) / sum(a["seconds"] for a in answers)
                    print(f"{event['variant']}: {speed:.2f} tok/s", flush=True)
            elif kind == "done":
                result.update(event)
            elif kind == "failed":
                print(f"{event['error']}\n{log.read_text()[-4000:]}", file=sys.stderr)
    result["runs"] = {name: answers for name, answers in result["runs"].items() if len(answers) == len(PROMPTS)}
    return result


def summary(answers: list[dict], width: int, depth: int, t_target: float) -> dict:
    """The figures of one tree: speed over whole requests, prefill included; the rest over rounds with a full tree.

    Where answers are too short for one, that rest is left out.
    """
    columns = ("tree_size", "accepted", "draft_seconds", "verify_seconds")
    rounds = [r for a in answers for r in zip(*(a["rounds"][c] for c in columns))]
    full = [rest for size, *rest in rounds if size == 1 + width * depth]
    wall = sum(a["seconds"] for a in answers)
    tokens = sum(len(a["tokens"]) for a in answers)
    speedup = (tokens / wall) * t_target
    figures = {"tree": [width, depth], "tokens_per_second": tokens / wall, "speedup": speedup, "rounds": len(full)}
    if not full:
        return figures
    accepted, draft, verify = (sum(column) / len(full) for column in zip(*full))
    tau = accepted + 1
    return {
        **figures, "tau": tau, "eta": speedup / tau, "t_draft_ms": 1e3 * draft / depth, "draft_ms": 1e3 * draft,
        "verify_ms": 1e3 * verify, "gamma": verify / t_target, "formula_speedup": tau * t_target / (draft + verify),
    }  # fmt: skip


def partings(plain: list[dict], subspec: list[dict]) -> list[dict]:
    """Where the texts part first, and what plain vLLM's log-probabilities there were."""
    found = []
    for i, (a, b) in enumerate(zip(plain, subspec)):
        for position, (x, y) in enumerate(zip(a["tokens"], b["tokens"])):
            if x != y:
                top = {int(t): p for t, p in a["logprobs"][position].items()}
                found.append({"prompt": i, "position": position, "plain": top.get(x), "subspec": top.get(y)})
                break
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", required=True)
    parser.add_argument(
        "--sweep", default="6x48", help="trees, WIDTHxDEPTH, comma-separated; the first is the main one"
    )
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--plain-tokens", type=int, default=32, help="a plain pass costs the same at every token")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for each method")
    parser.add_argument("engine", nargs="*", help="key=value, as LLM takes them")
    args = parser.parse_intermixed_args()
    engine = parse_pairs(args.engine, "engine")
    trees = [parse_tree(t) for t in args.sweep.split(",")]
    largest = max(trees, key=lambda t: t[0] * t[1])
    spec = {"method": "subspec", "tree_width": largest[0], "tree_depth": largest[1], "confidence_threshold": 0.0}

    common = {"model": args.model, "engine": engine}
    variants = [{"name": f"{width}x{depth}", "tree": [width, depth]} for width, depth in trees]
    ours = run(
        {**common, "speculative_config": spec, "variants": variants, "max_tokens": args.max_tokens}, args.timeout
    )
    plain = run({**common, "speculative_config": None, "variants": [{"name": "plain", "tree": None}],
                 "max_tokens": args.plain_tokens, "logprobs": 5}, args.timeout)  # fmt: skip
    if not plain["runs"] or not ours["runs"]:
        print("a method was not through with the prompts; see above", file=sys.stderr)
        return 1
    answers = plain["runs"]["plain"]
    t_target = sum(a["seconds"] for a in answers) / sum(len(a["tokens"]) for a in answers)

    machine = plain.pop("machine")
    del ours["machine"]
    report = {
        "command": " ".join(["python", "examples/offload.py", *portable(sys.argv[1:])]),
        "vllm": machine["versions"]["vllm"], "torch": machine["versions"]["torch"], "gpu": machine["device"],
        "plain": {"tokens_per_second": 1 / t_target, "t_target_ms": 1e3 * t_target,
                  **{k: v for k, v in plain.items() if k != "runs"}},
        "subspec": {k: v for k, v in ours.items() if k != "runs"},
        "trees": [summary(a, *parse_tree(name), t_target) for name, a in ours["runs"].items()],
        "partings": partings(answers, next(iter(ours["runs"].values()))),
        "compared_tokens": sum(len(a["tokens"]) for a in answers),
    }  # fmt: skip
    Path(args.out).write_text(json.dumps(report, indent=1))
    print(f"plain {1 / t_target:.2f} tok/s, a pass {1e3 * t_target:.1f} ms; partings {report['partings']}")
    print("tree    tok/s  speedup    tau   eta draft ms verify ms gamma")
    columns = (("tau", "6.2f"), ("eta", "5.2f"), ("t_draft_ms", "6.2f"), ("verify_ms", "7.1f"), ("gamma", "5.2f"))
    for t in report["trees"]:
        rest = " ".join(format(t[key], form) if key in t else "-" for key, form in columns)
        print("{:>2}x{:<3} {:7.2f} {:7.2f}x {}".format(*t["tree"], t["tokens_per_second"], t["speedup"], rest))
    return 0


if __name__ == "__main__":
    sys.exit(main())
