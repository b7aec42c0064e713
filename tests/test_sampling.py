"""Requests that need more than the argmax are speculated too, and get plain vLLM's tokens.

The reference is plain vLLM on Model Runner V2, whose noise depends on seed and position only.
"""

from __future__ import annotations

import engine
import pytest
from prompts import requests
from test_lossless import random_requests, tau, tokens

SEEDED = [
    {"seed": 1, "temperature": 0.2},
    {"seed": 2, "temperature": 0.7, "top_k": 20},
    {"seed": 3, "temperature": 1.0},
    {"seed": 4, "temperature": 1.0, "top_p": 0.8},
    {"seed": 5, "temperature": 1.3, "min_p": 0.02},
    {"seed": 6, "temperature": 1.5, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
]
PATH_DEPENDENT = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"logit_bias": {"5": 4.0, "6": 4.0}},
    {"allowed_token_ids": list(range(40, 90))},
    {"min_tokens": 20, "stop_token_ids": list(range(3, 110))},
    {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "top_p": 0.9},
    {"temperature": 0.8, "seed": 4, "presence_penalty": 1.0, "min_p": 0.05},
]
SCORED = [
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"logprobs": 4, "temperature": 0.9, "seed": 11},
    {"logprobs": 2, "repetition_penalty": 1.2},
]
CUSTOM = [{}, {"temperature": 0.9, "seed": 6, "top_p": 0.95}]
HOT = [{"seed": 8, "temperature": 2.0}, {"seed": 9, "temperature": 2.0, "top_k": 40}]
CASES = {"hot": HOT, "seeded": SEEDED, "path dependent": PATH_DEPENDENT, "scored": SCORED, "custom": CUSTOM}


def one_by_one(params: list[dict], max_tokens: int) -> list[list[dict]]:
    requests = [random_requests(20 + i, [17], max_tokens)[0] for i in range(len(params))]
    return [[{**r, "params": {**r["params"], **p}}] for r, p in zip(requests, params)]


@pytest.fixture(scope="module")
def answers(tiny_checkpoints):
    """Plain and subspec answers, by name, and of subspec each request's tau."""
    lengths = {"hot": 64, "seeded": 64, "path dependent": 48, "scored": 24, "custom": 32}
    jobs = {name: one_by_one(params, lengths[name]) for name, params in CASES.items()}
    jobs = {name: {"model": tiny_checkpoints["llama"], "batches": batches} for name, batches in jobs.items()}
    jobs["custom"]["engine"] = {"logits_processors": ["processors:NoNeighbours", "processors:Witness"]}
    jobs["custom"]["probe"] = "witness"
    plain = dict(zip(jobs, engine.run([*jobs.values()], in_process=True, subspec_env=True)))
    ours = dict(zip(jobs, engine.subspec([*jobs.values()], tree_width=3, tree_depth=6)))
    return plain, ours


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_plain_vllm(answers, case):
    """Catches: a distribution, penalty, ban or noise that a node of the tree gets for another node or position."""
    plain, ours = answers
    assert plain[case]["v2"]
    for params, want, got in zip(CASES[case], tokens(plain[case]), tokens(ours[case])):
        assert got == want, params
    assert tau(ours[case]) > 1.5  # they were speculated


def test_custom_processors_are_called_as_vllm_promises(answers):
    """Catches: a processor of the user's own that is called more than once a step, on rows of a tree, or on positions
    that are not the request's next ones: one that counts or keeps state would go wrong."""
    for answer in answers:
        calls = answer["custom"]["probe"]
        for call in calls:
            for offsets, positions in call:
                assert offsets == positions == list(range(len(offsets)))
    plain, ours = (answer["custom"] for answer in answers)
    assert len(plain["probe"]) == sum(len(ids) for batch in tokens(plain) for choices in batch for ids in choices)
    assert len(ours["probe"]) == len(ours["rounds"]) < len(plain["probe"])
    assert max(len(offsets) for call in ours["probe"] for offsets, _ in call) == 1 + 6  # a level a row


def test_the_draft_knows_the_noise(answers):
    """Catches: a draft of the likeliest tokens, which are rarely drawn where all are nearly as likely."""
    _, ours = answers
    assert tau(ours["hot"]) > 4  # 2.7 without the noise; a whole tree is 7


def test_logprobs_equal_plain_vllm(answers):
    """Catches: logprobs of another row, of the draft, or missing for accepted tokens."""
    plain, ours = answers
    for params, (want,), (got,) in zip(SCORED, plain["scored"]["batches"], ours["scored"]["batches"]):
        for kind in ("logprobs", "prompt_logprobs"):
            flat = lambda a: [entry for top in (a[kind][0] if kind == "logprobs" else a[kind]) or [] for entry in top]  # noqa: E731, B023
            assert [(t, rank) for t, _, rank in flat(got)] == [(t, rank) for t, _, rank in flat(want)], params
            assert [p for _, p, _ in flat(got)] == pytest.approx([p for _, p, _ in flat(want)], abs=1e-4), params


def exact_distribution(path: str, prompt: list[int], top_k: int, temperature: float, length: int) -> dict:
    """Probability of every continuation of that length, from transformers' logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = {(): 1.0}
    for _ in range(length):
        with torch.no_grad():
            best = model(torch.tensor([[*prompt, *done] for done in found])).logits[:, -1].topk(top_k)
        steps = zip(best.indices.tolist(), torch.softmax(best.values / temperature, -1).tolist())
        found = {(*done, t): p * q for (done, p), step in zip(found.items(), steps) for t, q in zip(*step)}
    return found


@pytest.mark.parametrize("draws", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_unseeded_requests_have_the_targets_distribution(tiny_checkpoints, draws):
    """Catches: noise shared between nodes or rounds, draft probabilities that leak into what is emitted.

    Pearson's chi-square of what was drawn against the target's exact distribution, continuations expected less than
    five times taken together; at most one false alarm in 10,000. The draws are those of one seed: no flakes.
    """
    import torch

    path, (request,) = tiny_checkpoints["llama"], random_requests(40, [10], 3)
    exact = exact_distribution(path, request["prompt"], top_k=3, temperature=2.0, length=3)
    request["params"] |= {"temperature": 2.0, "top_k": 3}
    (answer,) = engine.subspec([{"model": path, "batches": [[request]] * draws}], tree_width=3, tree_depth=3)
    assert sum(r["accepted"] for r in answer["rounds"]) > draws / 2
    drawn: dict[tuple, int] = {}
    for ((emitted,),) in tokens(answer):
        drawn[tuple(emitted)] = drawn.get(tuple(emitted), 0) + 1
    assert set(drawn) <= set(exact)
    cells = [(drawn.get(done, 0), draws * p) for done, p in exact.items()]
    often = [(n, expected) for n, expected in cells if expected >= 5]
    rare = [sum(side) for side in zip(*(cell for cell in cells if cell[1] < 5))]
    often += [rare] if rare else []
    statistic = sum((n - expected) ** 2 / expected for n, expected in often)
    freedom = torch.tensor((len(often) - 1) / 2, dtype=torch.float64)
    p_value = torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64))
    print(f"{draws} draws, {len(often)} cells, chi-square {statistic:.1f}, p {p_value:.3f}")
    assert len(often) > 6 and p_value > 1e-4


@pytest.mark.slow
def test_smollm2_requests_equal_plain_vllm(smollm2):
    """The same on a real model, with words to avoid (they need a tokenizer). Ten minutes of the interpreter."""
    kinds = [
        {"temperature": 0.7, "top_p": 0.9, "seed": 1},
        {"temperature": 1.0, "top_k": 40, "seed": 2},
        {"bad_words": ["the", " the", " sea", "a"]},
        {"temperature": 0.6, "seed": 3, "repetition_penalty": 1.1, "bad_words": [" is"]},
    ]
    batches = [[{**r, "params": {**r["params"], **kind}}] for r, kind in zip(requests(64, len(kinds)), kinds)]
    job = {"model": smollm2, "engine": {"max_model_len": 1024}, "batches": batches}
    (expected,) = engine.run([job], in_process=True, subspec_env=True)
    (answer,) = engine.subspec([job], tree_width=2, tree_depth=6)
    assert tokens(answer) == tokens(expected)
    assert tau(answer) > 2.0
