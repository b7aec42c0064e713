"""How long a draft pass takes at a model's shapes, which kernels take it, and how much GPU memory the engine needs.

    python examples/draft_pass.py examples/shapes/qwen2.5-7b --vram 8GiB --out result.json [options of LLM as key=value]

Weights are random: a directory with a config.json is enough, and nothing is said about acceptance. Each context is
random tokens; times are of draft passes in a row without the verification between, so of the GPU alone. The engine
runs in this process, which may use no more than --vram of the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import median

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, where its memory can be read

from vllm_subspec.tools.bench.command import portable
from vllm_subspec.tools.bench.engine import limit_memory, machine, peak_memory
from vllm_subspec.tools.bench.methods import SHAPE, default_tree
from vllm_subspec.tools.bench.settings import parse_pairs
from vllm_subspec.tools.sizes import GIB, parse_size

REPEATS = 5


def draft_pass_ms(speculator, context: int) -> float:
    """Median milliseconds of one pass of a whole tree's draft after ``context`` tokens."""
    import torch

    depth, taken = speculator.tree_depth, []
    length, root = torch.tensor(context, device="cuda"), torch.tensor(1, device="cuda")
    for _ in range(1 + REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        speculator.draft(root, length, speculator.tree_width * depth)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return 1e3 * median(taken[1:]) / depth


def kernels(speculator, context: int) -> list[dict]:
    """Microseconds and launches of each kernel in one draft pass, the longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    passes = 2
    length, root = torch.tensor(context, device="cuda"), torch.tensor(1, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        speculator.draft(root, length, speculator.tree_width * passes)
        torch.cuda.synchronize()
    events = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
    return [
        {"kernel": e.key[:100], "us": e.self_device_time_total / passes, "launches": e.count / passes}
        for e in events
        if e.self_device_time_total > 0
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory with a config.json")
    parser.add_argument("--out", required=True)
    parser.add_argument("--vram", default="8GiB")
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1000, 1700], help="below max_model_len - tree")
    parser.add_argument("--subspec", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("engine", nargs="*", help="key=value, as LLM takes them")
    args = parser.parse_intermixed_args()

    from vllm import LLM, SamplingParams

    engine = {
        "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 2048,
        "max_num_seqs": 1, "offload_backend": "prefetch", "offload_group_size": 1, "offload_num_in_group": 1,
        "offload_prefetch_step": 2, "compilation_config": {"mode": 0}, **parse_pairs(args.engine, "engine"),
    }  # fmt: skip
    full = {"method": "subspec", **dict(zip(SHAPE, default_tree())), "confidence_threshold": 0.0}
    spec = {**full, **parse_pairs(args.subspec, "--subspec")}
    room = engine["max_model_len"] - (1 + spec["tree_width"] * spec["tree_depth"])
    if max(args.contexts) > room:
        parser.error(f"--contexts of more than {room} leave no room for the tree; raise max_model_len")
    engine["gpu_memory_utilization"] = limit_memory(parse_size(args.vram))
    started = time.perf_counter()
    llm = LLM(args.model, speculative_config=spec, **engine)
    report = {
        "command": " ".join(["python", "examples/draft_pass.py", *portable(sys.argv[1:])]),
        **machine(), "engine": engine, "vram_gib": parse_size(args.vram) / GIB,
        "start_seconds": time.perf_counter() - started,
    }  # fmt: skip

    rnd = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, detokenize=False)
    prompt = [rnd.randrange(10, 1000) for _ in range(engine["max_model_len"] - params.max_tokens - 1)]
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)  # as much memory as serving takes
    rounds = llm.collective_rpc("subspec_rounds")[0]
    verify = [1e3 * r["verify_seconds"] for r in rounds if r["tree_size"] > 1]
    report |= {"verify_ms": median(verify), **peak_memory()}

    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    speculator = worker.model_runner.speculator
    report["tree"] = [speculator.tree_width, speculator.tree_depth]
    report["t_draft_ms"] = {context: draft_pass_ms(speculator, context) for context in args.contexts}
    report["kernels"] = kernels(speculator, max(args.contexts))
    Path(args.out).write_text(json.dumps(report, indent=1))

    for context, ms in report["t_draft_ms"].items():
        print(f"context {context}: a draft pass {ms:.2f} ms")
    print(
        f"a verification {report['verify_ms']:.1f} ms; started in {report['start_seconds']:.0f} s; at most "
        f"{report['peak_allocated_gib']:.2f} GiB allocated, {report['peak_reserved_gib']:.2f} GiB reserved"
    )
    for k in report["kernels"][:15]:
        print(f"{k['us']:9.1f} us {k['launches']:5.0f}x  {k['kernel']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
