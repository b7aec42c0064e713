"""Random mixes of everything a request may be, against plain vLLM (see fuzz.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import engine
import pytest
import tiny

from vllm_subspec.tools.smollm2 import cache_dir

SECONDS = 60
DEFAULT_SCHEDULER = {"max_num_seqs": None, "max_num_batched_tokens": None}
"""vLLM's own choice: hundreds of requests at a time, prompts in one piece"""

SEEDS = range(1, 1 + int(os.environ.get("SUBSPEC_FUZZ_SEEDS", "1")))  # of each case on a GPU
EPISODES = 5  # of 12 requests: every size of tree once
WINDOW = [family for family, (_, config) in tiny.FAMILIES.items() if config.get("sliding_window")]
"""Families whose layers give blocks back while a request runs: requests hardly push one another out."""
NOT_OFFLOADED = ("olmo2", "smollm3")
"""Families of vLLM's Transformers backend, which offloads nothing"""
GPU = {
    "attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**28,
    "block_size": 16,
}  # fmt: skip
PREFETCH = {"offload_group_size": 1, "offload_num_in_group": 1, "offload_prefetch_step": 1}
UVA = {"cpu_offload_gb": 1}
COMPILED = {
    "enforce_eager": False,
    "compilation_config": {"mode": 3, "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 8, 64]},
}
OFFLOADS = {"resident": {}, "prefetch": PREFETCH, "uva": UVA}
DEPLOYED = {
    "prefetch": {**PREFETCH, **DEFAULT_SCHEDULER}, "uva": {**UVA, **DEFAULT_SCHEDULER},
    "prefetch-compiled": {**PREFETCH, **DEFAULT_SCHEDULER, **COMPILED},
    "uva-compiled": {**UVA, **DEFAULT_SCHEDULER, **COMPILED},
}  # fmt: skip
IEEE = {
    # In TF32, vLLM's own choice, attention rounds by 1e-3 and otherwise for every shape of a batch: enough to part from
    # plain vLLM in near ties. Triton's cache does not know of the variable, so it gets a cache of its own.
    "TRITON_F32_DEFAULT": "ieee", "TRITON_CACHE_DIR": str(cache_dir() / "triton-ieee"),
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest", "NVIDIA_TF32_OVERRIDE": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # draws at random, where vLLM's own depends on seed and position alone
}  # fmt: skip


def fuzz(tmp_path: Path, model: str, seed: int | str, seconds: float = SECONDS, **options) -> dict:
    """What `fuzz.run` reports, from a process of its own."""
    job = {"model": model, "seed": seed, "seconds": seconds, **options}
    out = tmp_path / "report.json"
    env = engine.environment(in_process=True, subspec_env=True)
    if engine.has_cuda():
        env |= IEEE
    command = [sys.executable, str(Path(__file__).parent / "fuzz.py"), json.dumps(job), str(out)]
    done = subprocess.run(command, env=env, timeout=10 * seconds + 300, capture_output=True, text=True)
    assert out.exists(), f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    report = json.loads(out.read_text())
    figures = {name: report[name] for name in ("requests", "accepted", "preemptions", "prefix_hits")}
    differing = sum("subspec" in problem for problem in report["problems"])
    print(f"\n{Path(model).name}, {seed}: {figures}, {differing} differ")
    return report


def check(report: dict) -> None:
    assert not report["problems"], report["problems"][0]
    assert report["requests"] >= 12 and report["accepted"] > 0


def test_random_requests_equal_plain_vllm(tiny_checkpoints, tmp_path):
    """Catches: any mix of arrival, parameters, abort, length and tree that changes a token, leaks a block or hangs."""
    check(fuzz(tmp_path, tiny_checkpoints["llama"], 1))


def test_random_requests_with_vllms_own_scheduler_settings(tiny_checkpoints, tmp_path):
    """Catches: the same in large batches, and with a window and a soft cap."""
    check(
        fuzz(
            tmp_path,
            tiny_checkpoints["gemma2"],
            1,
            episodes=1,
            engine={**DEFAULT_SCHEDULER, "num_gpu_blocks_override": 24},
        )
    )


def fuzz_on_gpu(tmp_path: Path, model: str, case: str, settings: dict) -> None:
    """Equality in float32, with as few KV blocks as one request needs, or little more."""
    family = Path(model).name
    blocks = {"num_gpu_blocks_override": 44 if family in WINDOW else 15}
    report = fuzz(
        tmp_path, model, f"{family} {case}", 2 * SECONDS, episodes=EPISODES, engine={**GPU, **blocks, **settings}
    )
    assert report["float32"] == ["highest", "ieee"]
    check(report)
    assert report["prefix_hits"] > 0
    assert report["preemptions"] > 0 or family in WINDOW


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("settings", DEPLOYED)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_random_requests_on_a_gpu_as_deployed(tiny_checkpoints, tmp_path, family, settings, seed):
    """Catches: as below, in batches of any size, and in compiled graphs that were made for other rows."""
    fuzz_on_gpu(tmp_path, tiny_checkpoints[family], f"{settings} {seed}", DEPLOYED[settings])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("settings", DEPLOYED)
def test_random_requests_to_a_trained_model_on_a_gpu(smollm2, tmp_path, settings, seed):
    """Catches: as below, where most of a tree is accepted."""
    fuzz_on_gpu(tmp_path, smollm2, f"{settings} {seed}", DEPLOYED[settings])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_random_requests_on_a_gpu(tiny_checkpoints, tmp_path, family, offload, seed):
    """Catches: kernels that read another request's KV or a freed block, a captured draft that holds on to the request
    before, a preempted or aborted request's tree, layers used before they came, windows and caps of other families."""
    if family in NOT_OFFLOADED and OFFLOADS[offload]:
        pytest.skip("vLLM offloads nothing of it")
    fuzz_on_gpu(tmp_path, tiny_checkpoints[family], f"{offload} {seed}", OFFLOADS[offload])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral_window"])
def test_an_hour_of_random_requests(tiny_checkpoints, tmp_path, family):
    """The same for twenty minutes a family; and memory does not grow once every kind of request has been seen."""
    report = fuzz(tmp_path, tiny_checkpoints[family], 2, 1200)
    check(report)
    if family == "llama":  # a window frees blocks, so that requests hardly push one another out
        assert report["preemptions"] > 0
    memory = report["memory_kib"]
    assert memory[-1] < 1.02 * memory[len(memory) // 2]
