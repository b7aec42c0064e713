"""On a CUDA GPU, with offloading: what the CPU cannot show. `make test-gpu`.

Starting an engine is most of a test's time, so each starts as few as it can, and several tests run at once.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import engine
import pytest
from filelock import FileLock
from fuzz import MODEL_LENGTH
from prompts import requests
from test_fuzz import DEFAULT_SCHEDULER, check, fuzz
from test_lossless import deficits, tau, tokens

from vllm_subspec.tools.bench.methods import ABLATION

pytestmark = pytest.mark.gpu

PREFETCH = {"offload_group_size": 1, "offload_num_in_group": 1, "offload_prefetch_step": 2}
GPU = {
    "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 1, "gpu_memory_utilization": 0.15,
    "attention_backend": "TRITON_ATTN", "enforce_eager": False, "compilation_config": {"mode": 0},
    # vLLM measures the whole GPU while it starts and fails if a test beside this one frees memory then, unless told.
    "kv_cache_memory_bytes": 2**30,
}  # fmt: skip
DEFAULTS = {"attention_backend": None, "compilation_config": {}}
"""vLLM's own choices: on an H200 FlashAttention 3 and, with the flag, -O0 where layers are offloaded"""
COMPILED = {"attention_backend": None, "compilation_config": {"mode": 3, "cudagraph_mode": "PIECEWISE"}}
"""Inductor and piecewise graphs, for who asks"""


def offloaded_job(model: str, max_tokens: int, count: int | None, **engine_args) -> dict:
    batches = [[r] for r in requests(max_tokens, count)]
    return {"model": model, "engine": {**GPU, **engine_args}, "batches": batches}


@pytest.fixture(scope="session")
def float32_job(smollm2) -> dict:
    """Three greedy and three sampled requests, in float32: the same for several tests (see `plain_float32`)."""
    job = offloaded_job(smollm2, 64, 6, dtype="float32", **{**PREFETCH, "max_model_len": 2048})
    for i, (request,) in enumerate(job["batches"][3:]):
        request["params"] |= {"temperature": 0.8, "top_p": 0.95, "seed": i}
    return job


@pytest.fixture(scope="session")
def plain_float32(float32_job, tmp_path_factory):
    """A function that returns plain vLLM's tokens for `float32_job`: one process asks, the others read the answer."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    path = tmp_path_factory.getbasetemp().parent / f"plain-float32-{run}.json"

    def answer() -> list:
        with FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_text(json.dumps(tokens(*engine.plain([float32_job]))))
        return json.loads(path.read_text())

    return answer


@pytest.mark.parametrize("settings", [COMPILED, DEFAULTS, {}], ids=["compiled", "defaults", "triton"])
def test_every_token_is_within_rounding_of_the_targets_argmax(smollm2, settings):
    """Catches: a wrong mask, slot, position or commit in the kernels: it shows as a token the target would not emit.

    bfloat16 rounds logits of SmolLM2 (up to 30) by up to 0.06, and a pass adds its own rounding. Plain vLLM's own
    answers are held to the same bound.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    job = offloaded_job(smollm2, 96, None, **PREFETCH, **settings)
    with ThreadPoolExecutor() as pool:  # most of this test's time is two engines that compile
        plain = pool.submit(engine.plain, [job])
        (ours,) = engine.subspec([job])
        (plain,) = plain.result()
    prompts = [
        list(tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, return_dict=False))
        if isinstance(r["prompt"], list)
        else tokenizer(r["prompt"])["input_ids"]
        for (r,) in job["batches"]
    ]
    worst = {}
    for name, answer in (("plain", plain), ("subspec", ours)):
        below = deficits(smollm2, prompts, [batch[0][0] for batch in tokens(answer)])
        worst[name] = max(below)
        print(
            f"{name}: {len(below)} tokens, {sum(d > 0 for d in below)} not the argmax, at most {max(below):.3f} below"
        )
    parted = sum(a != b for a, b in zip(tokens(plain), tokens(ours)))
    print(f"{parted} of {len(prompts)} answers part from plain vLLM's")
    assert ours["compiled"] == (settings is COMPILED)
    assert worst["plain"] < 0.5 and worst["subspec"] < 0.5
    assert tau(ours) > 6.0


@pytest.mark.parametrize("settings", [DEFAULTS, COMPILED], ids=["defaults", "compiled"])
def test_requests_that_come_and_go_get_tokens_within_rounding(smollm2, tmp_path, settings):
    """Catches: in bfloat16 and vLLM's own attention, where nothing can be held to plain vLLM's tokens, a tree beside or
    after another request that reads or leaves KV of the wrong one; preemption, hits in the prefix cache, aborts too.

    Both are held to the bound of the test above.
    """
    offload = {**PREFETCH, **DEFAULT_SCHEDULER, "dtype": "bfloat16", "num_gpu_blocks_override": 15, "block_size": 16}
    arguments = {**GPU, **offload, **settings, "max_model_len": MODEL_LENGTH}
    report = fuzz(tmp_path, smollm2, 1, episodes=6, exact=False, engine=arguments)
    check(report)
    assert report["preemptions"] > 0 and report["prefix_hits"] > 0
    prompts = [answer["prompt"] for answer in report["answers"]]
    assert len(prompts) > 6
    for name in ("plain", "subspec"):
        below = deficits(smollm2, prompts, [answer[name][0] for answer in report["answers"]])
        print(f"{name}: {len(below)} tokens of {len(prompts)} answers, at most {max(below):.3f} below the argmax")
        assert max(below) < 0.5


def test_a_round_waits_for_nothing(smollm2):
    """Catches: a host synchronisation between the start of a draft and the end of its commit."""
    job = {**offloaded_job(smollm2, 64, 2, **PREFETCH), "probe": "without_synchronisation"}
    sampled = {"temperature": 0.7, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.1, "logprobs": 2}
    job["batches"] += [[{**r, "params": {**r["params"], **sampled}}] for (r,) in job["batches"]]
    (answer,) = engine.subspec([job])
    assert len(answer["probe"]) >= 12
    assert tau(answer) > 2.0  # the rounds did not fail and fall back


@pytest.mark.parametrize("max_num_seqs", [1, None])
def test_no_kernel_is_compiled_for_a_request(smollm2, max_num_seqs):
    """Catches: seconds of compilation in the first answer, or in the last rounds of one, where trees are smaller."""
    job = {**offloaded_job(smollm2, 70, 2, **PREFETCH, max_num_seqs=max_num_seqs), "probe": "compiled"}
    (answer,) = engine.subspec([job])
    before, after = answer["probe"]
    assert set(before) == {"_attention_kernel", "_combine_kernel", "_move_kernel", "_noise_kernel"}
    assert all(before.values()) and after == before


def test_early_ends_cost_no_token(float32_job, plain_float32):
    """Catches: a level that the GPU had not finished taken for the last; rows of an earlier draft in the tree."""
    (ours,) = engine.subspec([float32_job], confidence_threshold=0.3)
    assert tokens(ours) == plain_float32()
    assert min(r["tree_size"] for r in ours["rounds"] if r["tree_size"] > 1) < 100
    assert tau(ours) > 3.0


def test_how_deep_a_draft_goes_depends_on_tokens_alone(smollm2):
    """Catches: trees of other sizes when the GPU, or the host, is late: by a score that was not there yet, or by that of a
    later level."""
    job = {**offloaded_job(smollm2, 1, 0, **PREFETCH, enable_prefix_caching=False), "probe": "delayed"}
    (answer,) = engine.subspec([job])
    for threshold, runs in answer["probe"].items():
        sizes = [[size for size, _ in request if size > 1] for request in runs[0]]
        print(f"confidence_threshold {threshold}: trees of {sizes}")
        assert any(a < b for request in sizes for a, b in zip(request, request[1:]))  # the smaller one ended early
        assert all(run == runs[0] for run in runs), threshold


def test_eager_engines_capture_the_draft(smollm2):
    """Catches: drafting kernel by kernel, several times slower, in deployments that have --enforce-eager; waits for
    streamed layers that are not seen, or longer than the pass that they are part of."""
    job = {**offloaded_job(smollm2, 48, 1, enforce_eager=True, **PREFETCH), "probe": "eager"}
    (answer,) = engine.subspec([job])
    assert answer["probe"]["captured"] and answer["probe"]["timed"] == [True]
    rounds = [r for r in answer["rounds"] if r["tree_size"] > 1]
    assert all(0 < r["wait_seconds"] < r["verify_seconds"] for r in rounds)
    assert tau(answer) > 3.0


def test_a_tree_larger_than_vllms_warm_up_has_room_for(float32_job, plain_float32):
    """Catches: warm-up writing beyond the block table of its request: an illegal memory access."""
    (ours,) = engine.subspec([float32_job], tree_width=24)
    assert tokens(ours) == plain_float32()
    assert tau(ours) > 3.0


@pytest.mark.parametrize("step", ABLATION)
def test_every_step_of_the_ablation_answers_as_plain_vllm(float32_job, plain_float32, step):
    """Catches: what bfloat16's rounding hides, greedy and sampled (the last step is the method); private KV in the
    wrong slots, a captured draft on the shared cache, layers used before they came."""
    (ours,) = engine.subspec([float32_job], **ABLATION[step])
    assert tokens(ours) == plain_float32()
    assert tau(ours) > 3.0


OFFLOADS = {
    "prefetch, every second layer": {"offload_group_size": 2, "offload_num_in_group": 1, "offload_prefetch_step": 1},
    "prefetch, the MLPs": {**PREFETCH, "offload_params": ["gate_up_proj", "down_proj"]},
    "uva, part of the model, compiled": {"cpu_offload_gb": 0.1, **COMPILED},
    "uva, the MLPs": {"cpu_offload_gb": 1, "cpu_offload_params": ["gate_up_proj", "down_proj"]},
}


@pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)
def test_exactly_the_offloaded_linears_are_substituted(smollm2, offload):
    """Catches: an offloaded linear that the draft would stream, or a resident one that it needlessly approximates."""
    job = {**offloaded_job(smollm2, 48, 2, **offload), "probe": "offloaded_and_substituted"}
    (answer,) = engine.subspec([job])
    assert answer["compiled"] == (offload.get("compilation_config") is COMPILED["compilation_config"])
    linears = {name.removesuffix(".weight") for name in answer["probe"]["offloaded"] if "proj" in name}
    assert linears == set(answer["probe"]["substituted"])
    assert 0 < len(linears) < 120
    assert tau(answer) > 3.0
