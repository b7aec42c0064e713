"""Plain vLLM against subspec on an offloaded model: one machine, one run, the same offload flags.

    python examples/offload.py MODEL --out results.json [--sweep 6x16,16x32] [-- options of LLM as key=value]

Greedy, batch 1, the six prompts of `vllm_subspec.prompts`. Each method runs in an engine process of its own. The
JSON holds the command, the versions, the GPU, and per method tokens/s, acceptance length (tau), t_draft (one draft
pass), t_target (one plain decoding pass), the verification pass, gamma = verification / t_target, speedup and
eta = speedup / tau, peak GPU memory and start-up time; and every place where the two texts part, with the
probabilities that plain vLLM gave to both tokens there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def child(job: dict) -> dict:
    """Measure one method in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import torch

    from vllm_subspec.generate import generate, start_engine
    from vllm_subspec.prompts import PROMPTS

    started = time.perf_counter()
    llm = start_engine(job["model"], job["spec"], **job["engine"])
    result = {"start_seconds": time.perf_counter() - started, "runs": {}}
    speculative = job["spec"] is not None
    for width, depth in job["trees"] or [(0, 0)]:
        if speculative:
            llm.collective_rpc("subspec_set_tree", args=(width, depth))
        generate(llm, PROMPTS[0], 2 * depth + 4, speculative)  # warm-up
        answers = [
            generate(llm, p, job["max_tokens"], speculative, logprobs=None if speculative else 5) for p in PROMPTS
        ]
        result["runs"][f"{width}x{depth}"] = [vars(answer) for answer in answers]
        Path(job["answer"]).write_text(json.dumps(result))
        print(f"{width}x{depth}: {sum(len(a.tokens) for a in answers) / sum(a.seconds for a in answers):.2f} tok/s", flush=True)
    if torch.cuda.is_available():
        result["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    Path(job["answer"]).write_text(json.dumps(result))
    return result


def run(job: dict, timeout: int) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        job = {**job, "answer": f"{directory}/answer.json"}
        asked = Path(directory) / "job.json"
        asked.write_text(json.dumps(job))
        try:
            subprocess.run([sys.executable, __file__, "--child", str(asked)], timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            print(f"stopped after {timeout} s: what was measured until then counts", file=sys.stderr)
        return json.loads(Path(job["answer"]).read_text())


def summary(answers: list[dict], width: int, depth: int, t_target: float) -> dict:
    """The figures of one tree. Speed is over whole requests, prefill included; the rest over rounds with a full tree."""
    rounds = [r for a in answers for r in a["rounds"]]
    full = [r for r in rounds if r["tree_size"] == 1 + width * depth]
    tau = sum(r["accepted"] + 1 for r in full) / len(full)
    verify = sum(r["verify_seconds"] for r in full) / len(full)
    draft = sum(r["draft_seconds"] for r in full) / len(full)
    per_round = draft + verify
    wall = sum(a["seconds"] for a in answers)
    tokens = sum(len(a["tokens"]) for a in answers)
    speedup = (tokens / wall) * t_target
    return {
        "tree": [width, depth], "tokens_per_second": tokens / wall, "speedup": speedup, "tau": tau, "eta": speedup / tau,
        "t_draft_ms": 1e3 * draft / depth, "draft_ms": 1e3 * draft, "verify_ms": 1e3 * verify,
        "gamma": verify / t_target, "rounds": len(full), "formula_speedup": tau * t_target / per_round,
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
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(Path(sys.argv[2]).read_text()))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", required=True)
    parser.add_argument("--sweep", default="6x48", help="trees, WIDTHxDEPTH, comma-separated; the first is the main one")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--plain-tokens", type=int, default=32, help="a plain pass costs the same at every token")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for each method")
    parser.add_argument("engine", nargs="*", help="key=value, as LLM takes them")
    args = parser.parse_intermixed_args()

    def value(text: str):
        try:
            return json.loads(text)
        except ValueError:
            return text

    engine = {k: value(v) for k, v in (item.split("=", 1) for item in args.engine)}
    trees = [tuple(map(int, t.split("x"))) for t in args.sweep.split(",")]
    largest = max(trees, key=lambda t: t[0] * t[1])
    spec = {"method": "subspec", "tree_width": largest[0], "tree_depth": largest[1]}

    ours = run({"model": args.model, "spec": spec, "engine": engine, "trees": trees, "max_tokens": args.max_tokens}, args.timeout)
    plain = run({"model": args.model, "spec": None, "engine": engine, "trees": None, "max_tokens": args.plain_tokens}, args.timeout)
    answers = plain["runs"]["0x0"]
    t_target = sum(a["seconds"] for a in answers) / sum(len(a["tokens"]) for a in answers)

    import torch
    import vllm

    report = {
        "command": " ".join(["python", "examples/offload.py", *sys.argv[1:]]).replace(args.model, Path(args.model).name),
        "vllm": vllm.__version__, "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "plain": {"tokens_per_second": 1 / t_target, "t_target_ms": 1e3 * t_target,
                  **{k: v for k, v in plain.items() if k != "runs"}},
        "subspec": {k: v for k, v in ours.items() if k != "runs"},
        "trees": [summary(a, *map(int, name.split("x")), t_target) for name, a in ours["runs"].items()],
        "partings": partings(answers, ours["runs"][args.sweep.split(",")[0]]),
        "compared_tokens": sum(len(a["tokens"]) for a in answers),
    }  # fmt: skip
    Path(args.out).write_text(json.dumps(report, indent=1))
    print(f"plain {1 / t_target:.2f} tok/s, a pass {1e3 * t_target:.1f} ms; partings {report['partings']}")
    print("tree    tok/s  speedup   tau   eta  t_draft  verify  gamma")
    for t in report["trees"]:
        print("{:>2}x{:<3} {:7.2f} {:7.2f}x {:6.2f} {:5.2f} {:6.2f}ms {:5.1f}ms {:5.2f}".format(
            *t["tree"], t["tokens_per_second"], t["speedup"], t["tau"], t["eta"], t["t_draft_ms"], t["verify_ms"], t["gamma"]))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
