"""Near a limit, with several requests, after a failure: smaller trees or plain steps."""

from __future__ import annotations

import engine
import pytest
from test_lossless import random_requests, tokens


@pytest.fixture(scope="module")
def answers(tiny_checkpoints):
    """Plain and subspec answers, by name, from one process each."""
    llama = tiny_checkpoints["llama"]
    sampled = {"temperature": 0.8, "min_p": 0.05, "seed": 7}
    shared = random_requests(5, [100], 16)[0]
    jobs = {
        "model length": {
            "model": llama,
            "engine": {"max_model_len": 128},
            "batches": [[r] for r in random_requests(1, [100, 126, 127], 500)],
        },
        **{
            f"model length {length}": {  # shorter than a tree, and so is what vLLM derives from it for a step
                "model": llama,
                "engine": {"max_model_len": length, "max_num_seqs": 1},
                "spec": {"tree_width": 6, "tree_depth": 48},
                "batches": [[r] for r in random_requests(length, lengths, 500)],
            }
            for length, lengths in {256: [170], 64: [1, 30, 61], 5: [1, 3]}.items()
        },
        "max tokens": {
            "model": llama,
            "batches": [[r] for n in (1, 2, 3, 7) for r in random_requests(2, [12], n)],
            "probe": "free_blocks",
        },
        "several": {
            "model": llama,
            "batches": [
                random_requests(3, [9], 12),
                random_requests(4, [3, 50, 17, 80, 33], 10),
                random_requests(6, [11], 12),
                [*random_requests(7, [8], 24), *random_requests(8, [8, 8], 3)],
            ],
            "probe": "free_blocks",
        },
        "chunks": {
            "model": llama,
            "engine": {"max_num_batched_tokens": 32, "max_num_seqs": 4},
            "batches": [[r] for r in random_requests(9, [31, 32, 33, 200], 20)],
        },
        "prefix cache": {
            "model": llama,
            "engine": {"enable_prefix_caching": True, "block_size": 32},
            "batches": [[shared], [shared], [{**shared, "prompt": shared["prompt"][:70] + [9, 8, 7]}]],
        },
        "stops": {
            "model": llama,
            "batches": [
                [{**r, "params": {**r["params"], "stop_token_ids": list(range(3, 60))}}]
                for r in random_requests(10, [6, 20, 40], 60)
            ],
        },
        "processed": {
            "model": llama,
            "batches": [
                *([r] for r in random_requests(11, [15], 8, repetition_penalty=1.3)),
                *([r] for r in random_requests(12, [15], 8, logit_bias={"5": 4.0, "6": 4.0})),
                *([r] for r in random_requests(13, [15], 8, min_tokens=6, stop_token_ids=list(range(3, 120)))),
                *([r] for r in random_requests(14, [15], 8, logprobs=3)),
                # Only one token is left to sample from, so this is greedy whatever the noise.
                *(
                    [{**r, "params": {**r["params"], "temperature": 1.0, "top_k": 1, "top_p": 0.9, "n": 2}}]
                    for r in random_requests(17, [15], 8)
                ),
            ],
        },
        "preempted": {
            "model": llama,
            "engine": {"max_model_len": 192, "block_size": 32, "num_gpu_blocks_override": 12, "max_num_seqs": 4},
            "batches": [random_requests(18, [60, 40, 70, 50], 90), random_requests(19, [100], 90)],
        },
        "sampled": {
            "model": llama,
            "batches": [[{**r, "params": {**r["params"], **sampled}}] for r in random_requests(15, [15, 60], 10)],
        },
    }
    spec = {"tree_width": 3, "tree_depth": 6}
    # Seeded sampling depends on the runner's noise, so plain vLLM runs on the same runner for that.
    same_runner = engine.run([jobs["sampled"]], in_process=True, subspec_env=True)
    strip = lambda job: {k: v for k, v in job.items() if k != "probe"}  # noqa: E731
    plain = dict(zip(jobs, engine.plain([strip(job) for job in jobs.values()])))
    plain["sampled"] = same_runner[0]
    ours = dict(zip(jobs, engine.subspec([*jobs.values()], **spec)))
    return plain, ours


CASES = [
    "model length",
    "model length 256",
    "model length 64",
    "model length 5",
    "max tokens",
    "several",
    "chunks",
    "prefix cache",
    "stops",
    "processed",
    "preempted",
    "sampled",
]


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_plain_vllm(answers, case):
    """Catches: a token lost, repeated or changed at a limit, in a mixed batch, after a cache hit, by an option."""
    plain, ours = answers
    assert tokens(ours[case]) == tokens(plain[case])
    finish = lambda a: [[r["finish"] for r in b] for b in a["batches"]]  # noqa: E731
    assert finish(ours[case]) == finish(plain[case])


def test_trees_shrink_to_what_the_request_may_still_emit(answers):
    """Catches: full trees drafted for one remaining token."""
    _, ours = answers
    sizes = [r["tree_size"] for r in ours["max tokens"]["rounds"]]
    assert max(sizes) <= 1 + 3 * 5  # seven tokens: one from the prefill, a tree of depth 5 and its bonus
    assert min(r["tree_size"] for r in ours["model length"]["rounds"]) == 1
    assert [max(r["tree_size"] for r in ours[f"model length {n}"]["rounds"]) for n in (64, 5)] == [61, 3]


def test_one_request_is_speculated_and_several_run_plain(answers):
    """Catches: speculation that never stops at several requests, or does not resume afterwards."""
    _, ours = answers
    rounds = ours["several"]["rounds"]
    last = [r["tree_size"] > 1 for r in rounds if r["request"] == rounds[-1]["request"]]
    # Three requests, of which two end after three tokens: then the one that is left has trees to its last token.
    alone = last.index(True)
    assert alone >= 1 and len(last) - alone >= 3 and all(last[alone:-1])


def test_requests_were_preempted_and_speculated_again(answers):
    """Catches: a case "preempted" in which nothing is."""
    _, ours = answers
    assert ours["preempted"]["metrics"]["vllm:num_preemptions"] > 0
    assert ours["preempted"]["rounds"][-1]["tree_size"] > 1


def test_all_kv_blocks_come_back(answers):
    """Catches: blocks leaked by trees."""
    _, ours = answers
    for case in ("max tokens", "several"):
        assert ours[case]["probe"]["before"] == ours[case]["probe"]["after"]


def test_a_fault_costs_no_request(tiny_checkpoints):
    """Catches: a fault inside the draft or the verification reaching the user, or a wrong token during or after it; one
    that lasts and makes every step as wide as a tree; failures that are not counted."""
    job = {"model": tiny_checkpoints["llama"], "batches": [[r] for r in random_requests(16, [10, 30], 40)]}
    (expected,) = engine.plain([job])
    probes = [{**job, "probe": "faults"}, {**job, "probe": "broken"}]
    answer, broken = engine.subspec(probes, tree_width=3, tree_depth=6)
    assert tokens(answer) == tokens(expected)
    assert set(answer["probe"]) == {"exception", "nan", "shape", "verify"}
    assert any(r["accepted"] for r in answer["rounds"])  # rounds in between are speculated
    assert any(r["failed"] for r in answer["rounds"])

    # What fails every time is given up: each try costs a pass over all its rows.
    assert tokens(broken) == tokens(expected)
    assert [r["failed"] for r in broken["rounds"]].count(True) == 3
    assert sum(rows > 0 for rows in broken["probe"]) == 3


def test_substitutes_without_room_stop_the_start_in_one_sentence(monkeypatch):
    """Catches: a bare out-of-memory error that does not say what to do."""
    import torch

    from vllm_subspec.engine.config import SubSpecConfig
    from vllm_subspec.weights import substitute

    layer = torch.nn.Linear(64, 64)
    monkeypatch.setattr(substitute, "linears_to_substitute", lambda model, which: {"layers.0.mlp": layer})

    def no_room(*args):
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(substitute, "quantize", no_room)
    with pytest.raises(ValueError, match="offload more layers"):
        substitute.make_substitutes(layer, SubSpecConfig, torch.device("cpu"))


def test_vllms_warm_up_stays_inside_the_model_length(tiny_checkpoints):
    """Catches: vLLM's warm-up, made for drafts of a few tokens, that overruns the block table with whole trees; that has a
    tree's logits for each of many requests, for which there may be no memory beside the KV cache."""
    job = {"model": tiny_checkpoints["llama"], "engine": {"max_model_len": 64}, "probe": "warmed_up"}
    job["batches"] = [[r] for r in random_requests(18, [10], 30)]
    (expected,) = engine.plain([{k: v for k, v in job.items() if k != "probe"}])
    (answer,) = engine.subspec([job], tree_width=3, tree_depth=20)
    assert answer["probe"]["longest"] <= 64
    assert answer["probe"]["rows"] <= 61  # what vLLM's profile has measured
    assert answer["probe"]["requests"] > 1  # kernels of batches too
    assert (answer["probe"]["trees"], answer["probe"]["max_num_seqs"]) == (60, 8)  # restored
    assert tokens(answer) == tokens(expected)
