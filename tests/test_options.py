"""Options of vLLM that work with subspec: the outputs are plain vLLM's, and trees are drafted where they should be."""

from __future__ import annotations

import re

import engine
import pytest
import tiny
from test_lossless import random_requests, tau, tokens
from transformers import PreTrainedTokenizerFast

BACKENDS = ["xgrammar", "guidance", "outlines"]
JSON_SCHEMA = {
    "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip

# By name: checkpoint, engine options. All of them on Model Runner V2 on both sides: some exist nowhere else.
OPTIONS = {
    "Transformers backend": ("llama", {"model_impl": "transformers"}),
    "dummy weights, one KV cache group": (
        "mistral_window", {"load_format": "dummy", "disable_hybrid_kv_cache_manager": True, "block_size": 64},
    ),
    "window off": ("mistral_window", {"disable_sliding_window": True, "max_model_len": 24}),
    "many": (
        "llama",
        {"load_format": "pt", "scheduling_policy": "priority", "performance_mode": "interactivity",
         "optimization_level": 0, "enforce_eager": False, "enable_prefix_caching": False,
         "worker_extension_cls": "extensions.Worker"},
    ),
    "sampling mask": ("llama", {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Plain and subspec answers, by name."""
    import torch
    from safetensors.torch import load_file

    root = tmp_path_factory.mktemp("options")
    checkpoints = {family: tiny.make(family, root / family) for family in ("llama", "mistral_window")}
    torch.save(load_file(root / "llama" / "model.safetensors"), root / "llama" / "model.pt")
    jobs = {}
    for i, (name, (family, options)) in enumerate(OPTIONS.items()):
        requests = random_requests(40 + i, [7] if "max_model_len" in options else [11, 60], 16)
        jobs[name] = {"model": checkpoints[family], "engine": options, "batches": [[r] for r in requests]}
    for (request,) in jobs["sampling mask"]["batches"]:
        request["params"] |= {"temperature": 1.0, "seed": 3, "top_k": 40}  # what vLLM asks for with masks
    plain = dict(zip(jobs, engine.run([*jobs.values()], in_process=True, subspec_env=True)))
    jobs["many"]["probe"] = "worker_calls"
    return plain, dict(zip(jobs, engine.subspec([*jobs.values()], tree_width=3, tree_depth=4)))


@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_equal_plain_vllm(answers, name):
    """Catches: an option that changes what trees attend to, sample from or are loaded with."""
    plain, ours = answers
    assert tokens(ours[name]) == tokens(plain[name])
    if name == "sampling mask":
        assert all(r["tree_size"] == 1 for r in ours[name]["rounds"])
    else:
        assert tau(ours[name]) > 1.5


def test_reload_weights_is_refused_and_the_engine_goes_on(answers):
    """Catches: substitutes of the old weights behind new ones, without a word."""
    told, model = answers[1]["many"]["probe"]
    assert "reload_weights" in told and "start a new engine" in told
    assert model == "LlamaForCausalLM"  # by the worker extension


def test_structured_outputs_of_every_backend_equal_plain_vllm(tmp_path_factory):
    """Catches: a grammar that plain steps of a speculating engine do not follow, whichever backend made it; room for a mask
    after every node of a tree of every request, GiB with vLLM's defaults."""
    checkpoint = tiny.make("llama", tmp_path_factory.mktemp("structured") / "llama")
    tiny.add_tokenizer(checkpoint)
    regex = {"structured_outputs": {"regex": "(yes|no), [0-9]{3}"}}
    asked = [
        *([{**r, "params": {**r["params"], **regex, "ignore_eos": False}}] for r in random_requests(60, [9, 20], 12)),
        *([r] for r in random_requests(61, [9], 12)),
    ]
    schema = {"structured_outputs": {"json": JSON_SCHEMA, "disable_any_whitespace": True}}
    last = [{**r, "params": {**r["params"], **schema, "ignore_eos": False}} for r in random_requests(62, [9], 24)]
    jobs = [
        {"model": checkpoint, "engine": {"structured_outputs_config": {"backend": b}}, "batches": [*asked, last]}
        for b in BACKENDS
    ]
    jobs[0]["probe"] = "grammar_masks"
    for job in jobs[1:]:
        job["batches"] = asked  # whitespace is a matter of the backend
    (want,) = engine.plain(jobs[:1])
    answers = engine.subspec(jobs, tree_width=3, tree_depth=4)
    assert answers[0]["probe"] == want["probe"] == 8  # the requests that there may be at once
    for backend, got in zip(BACKENDS, answers):
        assert tokens(got) == tokens(want)[: len(got["batches"])], backend
        assert tau(got) > 1.5, backend  # the request without a grammar
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    text = tokenizer.decode(tokens(want)[0][0][0], skip_special_tokens=True)
    assert re.fullmatch("(yes|no), [0-9]{3}", text)
