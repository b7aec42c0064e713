"""vLLM's OpenAI server with the flag, started as a user starts it, in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import engine
import openai
import pytest

PROMPTS = ["Give three tips for staying healthy.", "Why is the sky blue?"]
MAX_TOKENS = 24


def processes_of(group: int) -> list[str]:
    """Command lines of the processes in a process group."""
    out = subprocess.run(["ps", "-eo", "pgid=,args="], capture_output=True, text=True).stdout
    return [line for line in out.splitlines() if line.split(None, 1)[0] == str(group)]


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    """(client, process) of a running server."""
    from vllm.utils.network_utils import get_open_port

    port = get_open_port()
    log = tmp_path_factory.mktemp("server") / "log"
    env = {k: v for k, v in os.environ.items() if k not in ("SUBSPEC_ON_CPU", "TRITON_INTERPRET")}  # as a user's
    env["VLLM_LOGGING_LEVEL"] = "INFO"
    command = [
        sys.executable, "-m", "vllm_subspec.cli", "serve", smollm2, "--served-model-name", "m", "--port", str(port),
        "--dtype", "float32", "--max-model-len", "1024", "--enforce-eager",
        "--speculative-config", '{"method":"subspec","tree_width":4,"tree_depth":8}',
    ]  # fmt: skip
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-")
    deadline = time.time() + 300
    while True:
        try:
            client.models.list()
            break
        except openai.APIConnectionError:
            if process.poll() is not None or time.time() > deadline:
                process.kill()
                pytest.fail(f"the server did not start:\n{log.read_text()[-6000:]}")
            time.sleep(1)
    yield client, process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


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
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
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
    values = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if "spec_decode" in line and line[0] != "#"}
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
