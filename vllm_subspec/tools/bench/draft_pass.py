"""How long a draft pass takes at a model's shapes, which kernels take it, and how much GPU memory the engine needs.

    python -m vllm_subspec.tools.bench.draft_pass --model examples/shapes/qwen2.5-7b --vram 8GiB --out result.json

Weights are random: a directory with a config.json is enough, and nothing is said about acceptance. Each context is
random tokens; times are of draft passes in a row without the verification between, so of the GPU alone. The engine
runs in this process, which may use no more than --vram of the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from ...cpu.platform import is_cpu_build
from ..sizes import parse_size
from .command import portable
from .engine import run_job
from .methods import SHAPE, default_tree
from .settings import parse_pairs

ENGINE = {
    "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 2048,
    "offload_backend": "prefetch", "offload_group_size": 1, "offload_num_in_group": 1, "offload_prefetch_step": 2,
    "compilation_config": {"mode": 0},
}  # fmt: skip
REPEATS = 5


def profile(llm, contexts: list[int]) -> dict[str, Any]:
    """Figures of an engine in this process: the time of a verification and of a draft pass by context, and its kernels."""
    from vllm import SamplingParams

    rnd = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, detokenize=False)
    prompt = [rnd.randrange(10, 1000) for _ in range(llm.model_config.max_model_len - params.max_tokens - 1)]
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)  # as much memory as serving takes
    rounds = llm.collective_rpc("subspec_rounds")[0]
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    speculator = worker.model_runner.speculator
    return {
        "tree": [speculator.tree_width, speculator.tree_depth],
        "verify_ms": median(1e3 * r["verify_seconds"] for r in rounds if r["tree_size"] > 1),
        "t_draft_ms": {context: draft_pass_ms(speculator, context) for context in contexts},
        "kernels": kernels(speculator, max(contexts)),
    }


def draft_seconds(speculator, context: int, passes: int) -> float:
    """Seconds that so many draft passes take after ``context`` tokens."""
    import torch

    length, root = torch.tensor(context, device="cuda"), torch.tensor(1, device="cuda")
    torch.cuda.synchronize()
    started = time.perf_counter()
    speculator.draft(root, length, speculator.tree_width * passes)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def draft_pass_ms(speculator, context: int) -> float:
    """Median milliseconds of one pass of a whole tree's draft after ``context`` tokens, the first draft left out."""
    taken = [draft_seconds(speculator, context, speculator.tree_depth) for _ in range(1 + REPEATS)]
    return 1e3 * median(taken[1:]) / speculator.tree_depth


def kernels(speculator, context: int) -> list[dict[str, Any]]:
    """Microseconds and launches of each kernel in one draft pass, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    passes = 2
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        draft_seconds(speculator, context, passes)
    events = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
    return [
        {"kernel": e.key[:100], "us": e.self_device_time_total / passes, "launches": e.count / passes}
        for e in events
        if e.self_device_time_total > 0
    ]


def main(argv: list[str]) -> int:
    """Measure, write, print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory with a config.json")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--vram", default="8GiB", metavar="SIZE")
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1000, 1700], help="below max_model_len - tree")
    parser.add_argument("--subspec", nargs="+", default=[], metavar="KEY=VALUE", help="options of method subspec")
    parser.add_argument("--engine", nargs="+", default=[], metavar="KEY=VALUE", help="arguments of vllm.LLM")
    args = parser.parse_args(argv)
    full = {**dict(zip(SHAPE, default_tree())), "confidence_threshold": 0.0}
    settings = {
        "model": Path(args.model).name, "vram": args.vram, "contexts": args.contexts,
        "subspec": {**full, **parse_pairs(args.subspec, "--subspec")},
        "engine": {**ENGINE, **parse_pairs(args.engine, "--engine")},
    }  # fmt: skip
    tree_size = 1 + settings["subspec"]["tree_width"] * settings["subspec"]["tree_depth"]
    room = settings["engine"]["max_model_len"] - tree_size
    if max(args.contexts) > room:
        parser.error(f"--contexts of more than {room} leave no room for the tree; raise max_model_len")
    if is_cpu_build():
        parser.error("this times a GPU's kernels, and this is vLLM's CPU build")

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, where it can be reached
    spec = {"method": "subspec", **settings["subspec"]}
    job = {"model": args.model, "vram": parse_size(args.vram), "variants": [], "speculative_config": spec}
    machine, found, peak = ({k: v for k, v in event.items() if k != "event"} for event in run_job({**settings, **job}))
    result = {
        "command": shlex.join(["python", "-m", "vllm_subspec.tools.bench.draft_pass", *portable(argv)]),
        "settings": settings, "start_seconds": machine.pop("seconds"), "machine": machine, **found, **peak,
    }  # fmt: skip
    Path(args.out).write_text(json.dumps(result, indent=1))

    for context, ms in result["t_draft_ms"].items():
        print(f"context {context}: a draft pass {ms:.2f} ms")
    print(
        f"a verification {result['verify_ms']:.1f} ms; started in {result['start_seconds']:.0f} s; at most "
        f"{result['peak_allocated_gib']:.2f} GiB allocated, {result['peak_reserved_gib']:.2f} GiB reserved"
    )
    for k in result["kernels"][:15]:
        print(f"{k['us']:9.1f} us {k['launches']:5.0f}x  {k['kernel']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
