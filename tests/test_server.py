"""vLLM's OpenAI server with the flag on a real model: text, streams, metrics, stop. test_serving.py has the rest."""

from __future__ import annotations

import os
import signal
import time

import engine
import pytest
from servers import processes_of, serve

PROMPTS = ["Give three tips for staying healthy.", "Why is the sky blue?"]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    """(client, process) of a running server."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(smollm2, log, {"tree_width": 4, "tree_depth": 8}, "--max-model-len", "1024") as running:
        yield running


@pytest.fixture(scope="module")
def expected(smollm2):
    """Plain vLLM's answers, as text."""
    from transformers import AutoTokenizer

    requests = [
        {"prompt": [{"role": "user", "content": p}], "params": {"temperature": 0.0, "max_tokens": MAX_TOKENS}}
        for p in PROMPTS
    ]
    job = {"model": smollm2, "engine": {"max_model_len": 1024}, "batches": [[r] for r in requests]}
    (answer,) = engine.plain([job])
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return [tokenizer.decode(b[0]["tokens"][0], skip_special_tokens=True) for b in answer["batches"]]


def ask(client, prompt: str, **more):
    messages = [{"role": "user", "content": prompt}]
    return client.chat.completions.create(model="m", messages=messages, temperature=0, max_tokens=MAX_TOKENS, **more)


def test_chat_completions_equal_plain_vllm(server, expected):
    """Catches: the flag lost between the processes, text that differs, usage counted wrongly."""
    client, _ = server
    for prompt, text in zip(PROMPTS, expected):
        answer = ask(client, prompt)
        assert answer.choices[0].message.content == text
        assert answer.usage.completion_tokens <= MAX_TOKENS


def test_streamed_chat_completions_equal_plain_vllm(server, expected):
    """Catches: pieces lost or repeated when several tokens arrive at once."""
    client, _ = server
    for prompt, text in zip(PROMPTS, expected):
        pieces = [c.choices[0].delta.content or "" for c in ask(client, prompt, stream=True) if c.choices]
        assert "".join(pieces) == text
        assert len(pieces) > 2


def test_sampled_and_constrained_requests_are_served(server):
    """Catches: a request with sampling, stop strings or a JSON schema failing because speculation is on."""
    import json

    client, _ = server
    messages = [{"role": "user", "content": "Name a city."}]
    sampled = client.chat.completions.create(
        model="m", messages=messages, temperature=0.7, top_p=0.9, seed=1, max_tokens=8, stop=["zzz"]
    )
    assert sampled.choices[0].finish_reason in ("stop", "length")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    constrained = client.chat.completions.create(
        model="m", messages=messages, temperature=0, max_tokens=40,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )  # fmt: skip
    if constrained.choices[0].finish_reason == "stop":
        assert set(json.loads(constrained.choices[0].message.content)) == {"n"}


def test_metrics_show_speculation(server, expected):
    """Catches: a server that answers by plain decoding."""
    import urllib.request

    client, _ = server
    ask(client, PROMPTS[0])
    text = urllib.request.urlopen(str(client.base_url).replace("/v1/", "/metrics")).read().decode()
    values = {
        line.split("{")[0]: float(line.split()[-1])
        for line in text.splitlines()
        if "spec_decode" in line and line[0] != "#"
    }
    assert values["vllm:spec_decode_num_accepted_tokens_total"] > values["vllm:spec_decode_num_drafts_total"] > 0


def test_it_stops_cleanly(server):
    """Catches: engine or worker processes left behind. Must be the last test that uses the server."""
    _, process = server
    group = process.pid
    os.kill(process.pid, signal.SIGINT)
    process.wait(timeout=60)
    deadline = time.time() + 20
    while processes_of(group) and time.time() < deadline:
        time.sleep(0.5)
    assert processes_of(group) == []
