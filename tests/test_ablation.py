"""The switches of the ablation (a private KV cache for the draft, transfers without overlap), and the bench's steps."""

from __future__ import annotations

from types import SimpleNamespace

import engine
import pytest
import tiny
from test_lossless import random_requests, tau, tokens

from vllm_subspec.tools.bench import methods, report, settings

TREE = {"tree_width": 3, "tree_depth": 4}
STEPS = {name: {**TREE, **options} for name, options in methods.ABLATION.items()}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict]:
    """Plain vLLM's and each step's, to a prompt of three chunks, the same again (most of it cached), two at once."""
    root = tmp_path_factory.mktemp("ablation")
    short, long = random_requests(0, [40, 130], 16)
    short["params"]["max_tokens"] = 6  # then the other one is left, with a context from common steps
    job = {
        "model": tiny.make("llama", root / "llama"),
        "engine": {"max_num_batched_tokens": 48, "block_size": 32},
        "batches": [[long], [long], [short, long]],
    }
    windows = {**job, "model": tiny.make("gemma2", root / "gemma2"), "batches": [[long]]}
    jobs = {step: {**job, "spec": spec} for step, spec in STEPS.items()}
    jobs["1 substitutes"]["probe"] = "grown_and_fresh"
    jobs["windows"] = {**windows, "spec": STEPS["1 substitutes"]}
    plain = zip(["plain", "plain windows"], engine.plain([job, windows]))
    return {**dict(zip(jobs, engine.subspec(list(jobs.values())))), **dict(plain)}


def accepted(answer: dict) -> list[list[tuple[int, int]]]:
    """Tree size and accepted tokens of each round, by request."""
    rounds: dict[str, list] = {}
    for r in answer["rounds"]:
        rounds.setdefault(r["request"], []).append((r["tree_size"], r["accepted"]))
    return list(rounds.values())


@pytest.mark.parametrize("step", STEPS)
def test_every_step_is_token_identical(answers, step):
    """Catches: a switch that changes the output, two drafts' KV mixed up, a private cache that vLLM does not count."""
    assert tokens(answers[step]) == tokens(answers["plain"])
    share = 2 if "share_kv" in STEPS[step] else 1
    assert answers[step]["num_gpu_blocks"] == answers["plain"]["num_gpu_blocks"] // share


def test_a_private_kv_cache_is_filled(answers):
    """Catches: a context that the draft has not seen: prompt chunks, cached blocks, steps of several requests."""
    private, shared = answers["1 substitutes"], answers["2 + shared KV"]
    assert 0.8 * tau(shared) < tau(private) < 1.2 * tau(shared)
    seen = private["probe"]
    assert sum(seen["blind"]) / len(seen["blind"]) < 0.5 * sum(seen["grown"]) / len(seen["grown"])
    first, again = accepted(private)[:2]
    assert len(again) < len(first)  # fewer passes over the prompt: it was cached, and in the draft's cache as well
    assert [r for r in again if r[0] > 1] == [r for r in first if r[0] > 1]


def test_private_kv_after_a_round_is_what_a_prefill_writes(answers):
    """Catches: an accepted path left out of the private cache's commit, a last level that the draft never saw."""
    rounds = answers["1 substitutes"]["probe"]
    assert TREE["tree_depth"] in rounds["grown"][:-1]  # a whole path, its last node included, was context later
    assert rounds["grown"] == rounds["fresh"]


def test_async_transfer_makes_no_difference_without_prefetch_offloading(answers):
    """Catches: a switch that does more than to the offloader."""
    on, off = answers["4 + async transfer"], answers["3 + sharpening"]
    assert accepted(on) == accepted(off)


def test_window_layers_may_have_private_kv(answers):
    """Catches: private layers that vLLM puts in a KV cache group other than the target's, with other blocks."""
    assert tokens(answers["windows"]) == tokens(answers["plain windows"])
    assert tau(answers["windows"]) > 2.0


def test_a_draft_that_cannot_follow_costs_no_request():
    """Catches: an exception of the draft's prefill that ends the engine."""
    import torch

    from vllm_subspec.tools.bench.ablation import PrivateKVSpeculator

    speculator = object.__new__(PrivateKVSpeculator)  # without the model that it would run
    speculator._placeholders = torch.zeros(2, 3)
    for _ in range(2):
        assert speculator.propose(SimpleNamespace(num_reqs=1), {}, {}).shape == (1, 3)


def test_a_layer_is_copied_when_it_is_reached():
    """Catches: a transfer ahead of its layer, a layer computed with what its buffer held before."""
    import torch
    from vllm.model_executor.offloader import get_offloader, set_offloader
    from vllm.model_executor.offloader.prefetch import PrefetchOffloader

    from vllm_subspec.tools.bench.ablation import transfer_when_reached

    parameter = SimpleNamespace(_gpu_buffer=torch.zeros(3), _cpu_storage=torch.ones(3))
    original, waited = object.__new__(PrefetchOffloader), []
    original.module_offloaders = [SimpleNamespace(_param_offloaders={"weight": parameter})]
    original.sync_prev_onload = lambda: waited.append(True)
    set_offloader(original)
    try:
        transfer_when_reached()
        assert waited  # for what was on its way into the same buffers
        assert isinstance(get_offloader(), PrefetchOffloader)
        torch.ops.vllm.start_prefetch(torch.zeros(1), 0)
        assert parameter._gpu_buffer.sum() == 0
        torch.ops.vllm.wait_prefetch(torch.zeros(1), 0)
        assert parameter._gpu_buffer.sum() == 3
    finally:
        set_offloader(None)


def test_steps_of_the_bench():
    """Catches: two steps that are one, a step beside its options, the user's temperature lost in the last ones."""
    made = settings.resolve("ablate: true", {"subspec": {"tree_width": 4, "draft_temperature": 0.4}})
    vanilla, *steps = methods.plan(made)
    assert vanilla.method == "vanilla"
    assert [e.name for e in steps] == [f"subspec {name}" for name in methods.ABLATION]
    keys = ("share_kv", "draft_temperature", "async_transfer", "confidence_threshold")
    assert [tuple(e.speculative_config.get(key, True) for key in keys) for e in steps] == [
        (False, 1.0, False, 0), (True, 1.0, False, 0), (True, 0.4, False, 0), (True, 0.4, True, 0),
        (True, 0.4, True, 0.2),
    ]  # fmt: skip
    assert {(e.variants[0].tree, e.speculative_config["tree_width"]) for e in steps} == {((4, 48), 4)}


@pytest.mark.parametrize("sweep, steps", [({}, "1234"), ({"depth": [8, 48]}, "123"), ({"depth": [8, 16]}, "1234")])
def test_drafts_of_full_depth_have_no_fifth_step(sweep, steps):
    """Catches: the same engine measured twice, as two steps or as a step and a sweep's row; the method at one
    temperature only."""
    given = {"sweep": sweep, "temperature": [0, 0.6], "subspec": {"confidence_threshold": 0}}
    made = methods.plan(settings.resolve("ablate: true", given))
    variants = [v for e in made for v in e.variants if v.name[8:9].isdigit()]
    assert "".join(v.name[8] for v in variants) == steps
    assert [v.first_only for v in variants] == [True, True, True, False][: len(steps)]


@pytest.mark.parametrize(
    "sweep, last", [({"depth": [8, 48]}, False), ({"depth": [8, 16]}, True), ({"draft_temperature": [0.2]}, False)]
)
def test_a_sweep_may_hold_the_last_step(sweep, last):
    """Catches: the whole method measured twice, or not at all; every step at every temperature."""
    made = settings.resolve("ablate: true", {"sweep": sweep, "temperature": [0, 0.6]})
    steps = [v for e in methods.plan(made) for v in e.variants if v.name[8:9].isdigit()]
    assert [v.name[8] for v in steps] == ["1", "2", "3", "4", "5"][: 4 + last]
    assert [v.first_only for v in steps] == [True, True, True, True, False][: 4 + last]


@pytest.mark.parametrize(
    "given, said",
    [({"methods": ["vanilla"]}, "--methods"), ({"subspec": {"share_kv": 1}}, "share_kv")],
)  # fmt: skip
def test_what_does_not_go_with_an_ablation(given, said):
    """Catches: steps that are silently not those of the ablation."""
    with pytest.raises(ValueError, match=said):
        settings.resolve(None, {"ablate": True, **given})


@pytest.mark.parametrize(
    "device, engine_args, same",
    [("CPU, 2 cores", {"offload_group_size": 1}, True), ("GPU", {}, True), ("GPU", {"offload_group_size": 1}, False),
     ("GPU", {"offload_group_size": 1, "offload_backend": "uva"}, True)],
)  # fmt: skip
def test_the_report_says_where_the_last_two_steps_are_the_same(device, engine_args, same):
    """Catches: a difference of chance reported as the gain of overlapping."""
    result = {
        "settings": {"ablate": True, "engine": engine_args}, "machine": {"device": device}, "engines": [],
        "failures": {}, "interrupted": False, "summary": [],
    }  # fmt: skip
    assert any("steps 3 and 4" in line for line in report.remarks(result)) == same
