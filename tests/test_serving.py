"""What clients of vLLM's OpenAI server send, with the flag on and off, on a tiny model: the same answers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
from servers import serve

LENGTH, DEPTH = 256, 8
OPTIONS = [
    "--max-model-len", str(LENGTH), "--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--block-size", "32",
    "--enable-prefix-caching", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
]  # fmt: skip
CITY = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def prompt(seed: int, length: int) -> list[int]:
    rnd = random.Random(seed)
    return [rnd.randrange(3, tiny.VOCAB) for _ in range(length)]


def completions(client, ids: list[int], max_tokens: int | None = 24, **more) -> list:
    """What a completion says of each choice: its tokens as text pieces with scores, and why it ended."""
    more = {"temperature": 0, "logprobs": 2, "extra_body": {"ignore_eos": True}, **more}
    answer = client.completions.create(model="m", prompt=ids, max_tokens=max_tokens, **more)
    choices = [[c.logprobs.tokens, c.logprobs.token_logprobs, c.text, c.finish_reason] for c in answer.choices]
    return [*choices, answer.usage.completion_tokens]


def same(a, b) -> bool:
    """Equal; scores within 1e-3 (in float32, batches of another size differ in the last bits)."""
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return abs(a - b) < 1e-3 if isinstance(a, float) else a == b


def chunks(client, ids: list[int], **more) -> list:
    more = {"temperature": 0, "max_tokens": 24, "stream_options": {"include_usage": True}, **more}
    return list(client.completions.create(model="m", prompt=ids, stream=True, **more))


def streamed(client, ids: list[int], **more) -> list:
    """What a stream's chunks say together; the last has the usage."""
    *parts, last = chunks(client, ids, **more)
    parts = [c.choices[0] for c in parts]
    scores = [(p.logprobs.tokens, p.logprobs.token_logprobs, p.logprobs.text_offset) for p in parts if p.logprobs]
    scores = [sum(of, []) for of in zip(*scores)]
    return ["".join(p.text for p in parts), scores, parts[-1].finish_reason, last.usage.completion_tokens]


def streamed_chat(client, **more) -> list:
    stream = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Hello there"}], temperature=0, max_tokens=24, stream=True,
        stream_options={"include_usage": True}, logprobs=True, **more,
    )  # fmt: skip
    *parts, last = list(stream)
    parts = [c.choices[0] for c in parts]
    scores = [[t.token, t.logprob] for p in parts if p.logprobs for t in p.logprobs.content]
    text = "".join(p.delta.content or "" for p in parts)
    return [text, scores, parts[-1].finish_reason, last.usage.completion_tokens]


def chat(client, **more) -> list:
    messages = [{"role": "user", "content": "Hello there"}]
    answer = client.chat.completions.create(model="m", messages=messages, temperature=0, max_tokens=24, **more)
    return [(c.message.content, c.finish_reason) for c in answer.choices]


def constrained(client, **constraint) -> list:
    return chat(client, extra_body={"structured_outputs": constraint, "ignore_eos": False})


def tool_call(client, choice) -> list:
    """What a request that must call a tool gets: calls, and the beginning of one that is too long."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": CITY}}]
    messages = [{"role": "user", "content": "Hello there"}]
    answer = client.chat.completions.create(
        model="m", messages=messages, temperature=0, max_tokens=60, tools=tools, tool_choice=choice,
        extra_body={"ignore_eos": False},
    )  # fmt: skip
    (made,) = answer.choices
    return [(c.function.name, c.function.arguments) for c in made.message.tool_calls or []] + [made.message.content]


def response(client, **more) -> str:
    return client.responses.create(
        model="m", input="Hello there", temperature=0, max_output_tokens=24, **more
    ).output_text


def responses_stream(client) -> str:
    events = client.responses.create(model="m", input="Hello there", temperature=0, max_output_tokens=24, stream=True)
    return "".join(e.delta for e in events if e.type == "response.output_text.delta")


CASES = {
    "completion": lambda c: completions(c, prompt(1, 20)),
    "stream": lambda c: streamed(c, prompt(1, 20)),
    "stream with scores": lambda c: streamed(c, prompt(1, 20), logprobs=2, extra_body={"ignore_eos": True}),
    "stream to a stop string": lambda c: streamed(
        c, prompt(1, 20), max_tokens=60, logprobs=1, stop=["w280", "a", "w300"]
    ),
    "echo": lambda c: completions(c, prompt(2, 12), echo=True),
    "several choices": lambda c: completions(
        c, prompt(3, 12), n=3, temperature=1, extra_body={"top_k": 1, "ignore_eos": True}
    ),
    "one token of one": lambda c: completions(c, prompt(4, 1), 1),
    "many of one": lambda c: completions(c, prompt(4, 1), 60),
    "several chunks": lambda c: completions(c, prompt(5, 200), 40),
    "prompt of the model's length": lambda c: completions(c, prompt(6, LENGTH - 1), 1),
    "answer to the model's length": lambda c: completions(c, prompt(7, LENGTH - 30), None),
    "stop string": lambda c: completions(c, prompt(1, 20), 60, stop=["w280", "a", "w300"]),
    "stop string kept": lambda c: completions(
        c, prompt(1, 20), 60, stop=["w280", "a", "w300"], extra_body={"include_stop_str_in_output": True}
    ),
    "stop ids": lambda c: completions(c, prompt(1, 20), 60, extra_body={"stop_token_ids": list(range(100, 140))}),
    "penalties": lambda c: completions(c, prompt(8, 20), presence_penalty=1.0, frequency_penalty=0.5),
    "bias": lambda c: completions(c, prompt(9, 20), logit_bias={"77": 9.0, "78": 8.5}),
    "bad words": lambda c: completions(
        c, prompt(1, 20), extra_body={"bad_words": ["w299", "w301"], "ignore_eos": True}
    ),
    "prompt logprobs": lambda c: completions(c, prompt(10, 20), extra_body={"prompt_logprobs": 1, "ignore_eos": True}),
    "shared prefix": lambda c: [completions(c, prompt(11, 90)[:n] + prompt(12, 5)) for n in (90, 90, 70, 64, 33)],
    "answer as prefix": lambda c: [
        completions(c, prompt(13, 40) + prompt(14, n), 40) for n in (0, 3, 30)
    ],
    "chat": lambda c: chat(c, logprobs=True, top_logprobs=2),
    "streamed chat": streamed_chat,
    "streamed chat to a stop string": lambda c: streamed_chat(c, stop=["w290"]),
    "json schema": lambda c: chat(
        c, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    ),
    "regex": lambda c: constrained(c, regex="(ab|cd){3}[0-9]+x"),
    "choice": lambda c: constrained(c, choice=["yes", "no"]),
    "grammar": lambda c: constrained(c, grammar='root ::= ("ab" | "cd") [0-9]+ "."'),
    "tool call": lambda c: tool_call(c, {"type": "function", "function": {"name": "f"}}),
    "some tool call": lambda c: tool_call(c, "required"),
    "response": response,
    "streamed response": responses_stream,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tiny.make("llama", tmp_path_factory.mktemp("serving") / "llama")
    tiny.add_tokenizer(path, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return path


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> dict:
    """Where the servers log, by name."""
    return {name: tmp_path_factory.mktemp(name) / "log" for name in ("plain", "subspec")}


@pytest.fixture(scope="module")
def expected(model, logs) -> dict:
    """Plain vLLM's answers by case, and to each of eight prompts."""
    with serve(model, logs["plain"], None, *OPTIONS) as (client, _):
        return {name: ask(client) for name, ask in CASES.items()} | {
            n: completions(client, prompt(n, 9 + n), 40) for n in range(8)
        }


@pytest.fixture(scope="module")
def client(expected, model, logs):
    spec = {"tree_width": 3, "tree_depth": DEPTH}
    with serve(model, logs["subspec"], spec, *OPTIONS, "--async-scheduling") as (client, _):
        yield client


def metrics(client) -> dict[str, float]:
    text = urllib.request.urlopen(str(client.base_url).replace("/v1/", "/metrics")).read().decode()
    lines = [line for line in text.splitlines() if line.startswith("vllm:") and "le=" not in line]
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines}


@pytest.mark.parametrize("case", CASES)
def test_answers_equal_plain_vllm(client, expected, case):
    """Catches: any parameter of a request that means something else, or fails, because trees are verified."""
    assert same(CASES[case](client), expected[case])


def test_a_chunk_brings_one_token(client):
    """Catches: a round's tokens in one chunk, for clients and parsers that single tokens were meant for."""
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    before = metrics(client)[accepted]
    *parts, _ = chunks(client, prompt(1, 20), max_tokens=60, logprobs=0, extra_body={"ignore_eos": True})
    assert [len(c.choices[0].logprobs.tokens) for c in parts] == [1] * 60
    assert metrics(client)[accepted] > before + 10


def test_one_then_eight_then_one(client, expected):
    """Catches: speculation that mixes requests up, that starves one, or that does not resume."""
    drafts = "vllm:spec_decode_num_drafts_total"
    for group in ([0], range(8), [1], [2, 3], [4]):
        before = metrics(client)[drafts]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda n: completions(client, prompt(n, 9 + n), 40), group))
        for n, answer in zip(group, answers):
            assert same(answer, expected[n]), n
        if len(group) == 1:
            assert metrics(client)[drafts] > before


def test_an_aborted_stream_leaves_nothing_behind(client, expected):
    """Catches: KV blocks or requests kept, or a wrong answer to the next request."""
    for _ in range(3):
        stream = client.completions.create(model="m", prompt=prompt(1, 20), max_tokens=200, temperature=0, stream=True,
                                           extra_body={"ignore_eos": True})  # fmt: skip
        next(iter(stream))
        stream.close()
    assert same(CASES["completion"](client), expected["completion"])
    after = metrics(client)
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0


def test_metrics_agree_with_one_another(client):
    """Catches: drafts or accepted tokens counted twice, or more accepted than emitted."""
    before = metrics(client)
    emitted = completions(client, prompt(15, 12), 60)[-1]
    delta = {k: v - before.get(k, 0.0) for k, v in metrics(client).items()}
    drafts, accepted = (delta[f"vllm:spec_decode_num_{k}_total"] for k in ("drafts", "accepted_tokens"))
    assert emitted == delta["vllm:generation_tokens_total"] == 60
    assert (
        0 < drafts and accepted <= emitted <= 1 + drafts + accepted + 2
    )  # the last round may emit more than is wanted


def test_vllms_own_benchmark_runs_against_it(client, tmp_path, model):
    """Catches: streams that vLLM's `bench serve` cannot read; a line of its report for each node of a tree."""
    code = (
        "import sys; from vllm.benchmarks.serve import add_cli_args, main;"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as P;"
        "p = P(); add_cli_args(p); main(p.parse_args())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--base-url", str(client.base_url).replace("/v1/", ""), "--model", "m",
         "--tokenizer", model, "--dataset-name", "random", "--num-prompts", "4", "--max-concurrency", "1",
         "--random-input-len", "12", "--random-output-len", "12", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "r.json").read_text())
    drafts, accepted = (report[f"spec_decode_{key}"] for key in ("num_drafts", "accepted_tokens"))
    assert report["completed"] == 4 and drafts >= 4
    rates = report["spec_decode_per_position_acceptance_rates"]
    assert len(rates) == DEPTH and sum(rates) * drafts == pytest.approx(accepted)
    assert report["spec_decode_draft_tokens"] <= drafts * DEPTH


def warnings(log) -> set[str]:
    """What a server warned of, without process, time and place."""
    return {line.split("] ", 1)[1] for line in log.read_text().splitlines() if " WARNING " in line and "] " in line}


def test_the_flag_adds_no_warning_whose_advice_does_not_apply(client, logs):
    """Catches: vLLM's advice to draft less, its warnings of asynchronous scheduling, of a custom scheduler class or of
    a missing Triton, where none of it is so."""
    added = warnings(logs["subspec"]) - warnings(logs["plain"])
    ours = {text for text in added if text.startswith("subspec: ")}
    assert len(ours) == 1 and "--async-scheduling is switched off" in ours.pop()
    # Of vLLM's, the one that is right.
    assert all("Intel OpenMP in LD_PRELOAD" in text for text in added if not text.startswith("subspec: "))
    assert "Triton is not installed" not in logs["subspec"].read_text()


def test_a_server_says_once_which_requests_run_plain(client, logs):
    """Catches: a user who wonders why a request is slow; a line a request."""
    for constraint in ({"regex": "ab|cd"}, {"choice": ["yes", "no"]}):
        constrained(client, **constraint)
    for _ in range(2):
        CASES["several choices"](client)
    text = logs["subspec"].read_text()
    assert text.count("subspec: Requests with structured output (a required tool call is one) run without") == 1
    assert text.count("subspec: Several requests at once (n > 1 and beam search make several of one) run without") == 1
    assert text.count("on a CPU nothing is offloaded") + text.count("decoder linears (0.00 GiB) is offloaded") == 1
