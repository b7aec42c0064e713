"""Random workloads against a live in-process engine: arrivals, parameters, aborts, lengths, trees.

    run(model, seed, seconds, ...) in a process of its own -> figures, and what went wrong, empty if nothing did

Plain vLLM (same runner) gets the same workload first.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import sys
import time
from pathlib import Path

VOCAB, MODEL_LENGTH = 320, 192
ENGINE = {
    "dtype": "float32", "max_model_len": MODEL_LENGTH, "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "block_size": 32, "num_gpu_blocks_override": 20, "enforce_eager": True, "skip_tokenizer_init": True,
    "disable_log_stats": False,
}  # fmt: skip
"""Room for about three long requests, so that four preempt one another; prompts come in chunks."""
ARGMAX = {"max_tokens", "ignore_eos", "temperature", "logprobs", "prompt_logprobs", "stop_token_ids"}
"""With these parameters, and temperature 0, each token is the argmax of the model's own logits."""
COUNTERS = {"preemptions": "vllm:num_preemptions", "prefix_hits": "vllm:prefix_cache_hits"}
TREES = [(5, 12), (1, 12), (3, 6), (7, 3), (1, 1)]  # of episodes one after the other; the largest first
MAX_STEPS = 3000  # of one episode; no request needs nearly as many
EPISODE = 12  # requests


def random_params(rnd: random.Random, room: int) -> dict:
    """Sampling parameters of one request that may emit ``room`` tokens."""
    params: dict = {"max_tokens": rnd.choice([1, 2, rnd.randint(1, 60), room, room]), "ignore_eos": rnd.random() < 0.8}
    params["max_tokens"] = max(1, min(params["max_tokens"], room))
    if rnd.random() < 0.5:
        params |= {"temperature": rnd.choice([0.2, 0.7, 1.0, 1.5]), "seed": rnd.randrange(1 << 30)}
        params |= rnd.choice(
            [{}, {"top_k": rnd.randint(1, 60)}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.8}]
        )
        if rnd.random() < 0.15:
            params["n"] = 2
    else:
        params["temperature"] = 0.0
    for chance, extra in (
        (0.2, rnd.choice([{"repetition_penalty": 1.2}, {"presence_penalty": 0.8}, {"frequency_penalty": 0.5}])),
        (0.1, {"logit_bias": {rnd.randrange(3, VOCAB): 5.0}}),
        (0.1, {"allowed_token_ids": rnd.sample(range(3, VOCAB), 50)}),
        (0.2, {"logprobs": rnd.randint(0, 4)}),
        (0.1, {"prompt_logprobs": 1}),
        (0.2, {"stop_token_ids": rnd.sample(range(3, VOCAB), 20)}),
    ):
        if rnd.random() < chance:
            params |= extra
    if "stop_token_ids" in params and rnd.random() < 0.5:
        params["min_tokens"] = min(5, params["max_tokens"])
    return params


def random_episode(rnd: random.Random) -> list[dict]:
    """Requests: when each arrives (step), its prompt and parameters, and after how many tokens it is aborted, if so.

    The first two come together and want all the tokens there are: where they do not fit, one pushes the other out.
    """
    common = [rnd.randrange(3, VOCAB) for _ in range(100)]
    requests, step = [], 0
    for number in range(EPISODE):
        length = rnd.choice([1, 2, rnd.randint(3, 40), rnd.randint(40, 150), MODEL_LENGTH - rnd.randint(1, 3)])
        if number < 2:
            length = rnd.randint(60, 90)
        shared = rnd.choice([0, rnd.randint(1, 100), 100])
        prompt = (common[:shared] + [rnd.randrange(3, VOCAB) for _ in range(length)])[:length]
        params, abort = random_params(rnd, MODEL_LENGTH - length), rnd.randint(0, 20) if rnd.random() < 0.15 else None
        if number < 2:
            params |= {"max_tokens": MODEL_LENGTH - length, "ignore_eos": True, "stop_token_ids": []}
            abort = None
        requests.append({"step": step, "prompt": prompt, "params": params, "abort": abort})
        step += rnd.choice([0, 0, 1, 5, 30]) if number else 0
    return requests


def drive(llm, requests: list[dict], prefix: str) -> list[list[list[int]]]:
    """Tokens of every request, per choice (n), from stepping the engine until all are done.

    Raises:
        RuntimeError: a request waits for ever.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, answers, waiting = llm.llm_engine, {}, list(enumerate(requests))
    step, begun = 0, {}
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0][1]["step"] <= step or not engine.has_unfinished_requests()):
            i, request = waiting.pop(0)
            params = SamplingParams(**request["params"], detokenize=False, output_kind=RequestOutputKind.CUMULATIVE)
            answers[i] = [[] for _ in range(params.n)]
            begun[f"{prefix}-{i}"] = (i, request["abort"])
            engine.add_request(f"{prefix}-{i}", {"prompt_token_ids": request["prompt"]}, params)
        for output in engine.step():
            i, abort = begun[output.request_id]
            for choice in output.outputs:
                answers[i][choice.index] = list(choice.token_ids)
            if abort is not None and not output.finished and len(answers[i][0]) >= abort:
                engine.abort_request([output.request_id])
        step += 1
        if step > MAX_STEPS:
            raise RuntimeError(f"requests wait for ever: {waiting}, {begun}")
    return [answers[i] for i in range(len(requests))]


def agree(plain: list[list[int]], ours: list[list[int]], aborted: bool) -> bool:
    """Equal; of an aborted request only as far as both got."""
    return all(a[: len(b)] == b[: len(a)] if aborted else a == b for a, b in zip(plain, ours))


def run(
    model: str,
    seed: int | str,
    seconds: float,
    episodes: int | None = None,
    exact: bool = True,
    engine: dict | None = None,
) -> dict:
    """Serve random episodes, first by plain vLLM, then with subspec.

    Args:
        seconds: for plain vLLM, half of it; no episode begins later
        episodes: at most so many
        exact: whether answers must be equal; otherwise those whose tokens are the argmax of the model are reported
        engine: arguments of LLM besides `ENGINE`
    """
    from vllm import LLM

    arguments = {**ENGINE, **(engine or {})}
    if os.environ.get("TRITON_INTERPRET") == "1":
        from vllm_subspec.cpu.kernels import use_torch_top_k_top_p

        use_torch_top_k_top_p()
    rnd = random.Random(seed)
    workload, expected, problems = [], [], []
    llm = LLM(model, **arguments)
    deadline = time.monotonic() + seconds / 2
    while time.monotonic() < deadline and len(workload) != episodes:
        number = len(workload)
        settings = {"confidence_threshold": rnd.choice([0.0, 0.2, 0.5])}
        workload.append((random_episode(rnd), TREES[number % len(TREES)], settings))
        expected.append(drive(llm, workload[-1][0], f"p{number}"))
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()

    width, depth = TREES[0]
    llm = LLM(model, **arguments, speculative_config={"method": "subspec", "tree_width": width, "tree_depth": depth})
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free, accepted, memory, answers = pool.get_num_free_blocks(), 0, [], []
    for number, ((requests, tree, settings), want) in enumerate(zip(workload, expected)):
        llm.collective_rpc("subspec_set_tree", args=tree, kwargs=settings)
        got = drive(llm, requests, f"s{number}")
        for i, request in enumerate(requests):
            case = {**request, "plain": want[i], "subspec": got[i]}
            if exact and not agree(want[i], got[i], request["abort"] is not None):
                problems.append({"episode": number, "index": i, "tree": tree, **settings, **case})
            if not exact and request["params"]["temperature"] == 0.0 and set(request["params"]) <= ARGMAX:
                answers.append(case)
        if pool.get_num_free_blocks() != free:
            problems.append({"episode": number, "free blocks": pool.get_num_free_blocks(), "initially": free})
        accepted += sum(r["accepted"] for r in llm.collective_rpc("subspec_rounds")[0])
        memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    counts = {m.name: m.value for m in llm.get_metrics() if m.name in COUNTERS.values()}
    llm.llm_engine.engine_core.shutdown()
    return {
        "requests": EPISODE * len(workload), "accepted": accepted, "problems": problems, "answers": answers,
        **{name: counts[metric] for name, metric in COUNTERS.items()},
        "float32": precision(), "memory_kib": memory,
    }  # fmt: skip


def precision() -> list[str | None]:
    """How this process multiplies float32: torch, and Triton where a kernel does not say (None: TF32 on a GPU)."""
    import torch
    import triton

    return [torch.get_float32_matmul_precision(), triton.knobs.language.fp32_default]


if __name__ == "__main__":
    job, out = sys.argv[1:]
    Path(out).write_text(json.dumps(run(**json.loads(job))))
