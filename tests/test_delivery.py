"""Clients of a stream get what plain decoding gives them, chunk by chunk, when rounds emit many tokens at once.

The front end and its parsers are vLLM's, the engine plays a script (see scripted.py), once a token a step on plain
vLLM, once in bursts with subspec.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import scripted
from scripted import Frontend

EOS = 2
BIG = 49  # a round's most by default: a path through the whole tree, and the token after it
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
NAMES = ("get_weather", "get_time")
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
ROME = '{"name": "get_time", "arguments": {"city": "Rome", "days": 12}}'
HERMES = f"Sure.\n<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>\n{ROME}\n</tool_call>"
XML = "Sure.\n" + "\n".join(
    f"<tool_call>\n<function={name}>\n<parameter=city>\n{city}\n</parameter>\n<parameter=days>\n{days}\n</parameter>\n"
    "</function>\n</tool_call>"
    for name, city, days in zip(NAMES, ("Paris", "Rome"), (3, 12))
)
PYTHON = '[get_weather(city="Paris", days=3), get_time(city="Rome", days=12)]'
MISTRAL = 'Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]get_time[ARGS]{"city": "Rome"}'
LLAMA = f"<|python_tag|>{PARIS}; {ROME}".replace("arguments", "parameters")
THOUGHT = "<think>\nLet me see: rain.\n</think>\n\n"
PLAIN = "It rains in Rome; naïve 天気 🎉🌧 is fine in Paris."

# By name: (tool parser, reasoning parser, what the model says).
PARSERS = {
    "none": (None, "", PLAIN),
    "hermes": ("hermes", "", HERMES),
    "qwen3_coder": ("qwen3_coder", "", XML),
    "qwen3_xml": ("qwen3_xml", "", XML),
    "llama3_json": ("llama3_json", "", LLAMA),
    "mistral": ("mistral", "", MISTRAL),
    "mistral, older": ("mistral", "", f"[TOOL_CALLS][{PARIS}, {ROME}]"),
    "pythonic": ("pythonic", "", PYTHON),
    "deepseek_r1": (None, "deepseek_r1", THOUGHT + PLAIN),
    "qwen3": (None, "qwen3", THOUGHT + PLAIN),
    "qwen3 and hermes": ("hermes", "qwen3", THOUGHT + HERMES),
    "deepseek_r1 and hermes": ("hermes", "deepseek_r1", THOUGHT + HERMES),
    "qwen3 and qwen3_coder": ("qwen3_coder", "qwen3", THOUGHT + XML),
}


@dataclass
class Both:
    """Plain vLLM and vLLM with subspec, and the event loop that both live in."""

    plain: Frontend
    ours: Frontend
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def tokens(self, text: str) -> list[int]:
        return self.plain.llm.renderer.tokenizer(text, add_special_tokens=False).input_ids + [EOS]

    def text(self, tokens: list[int]) -> str:
        return self.plain.llm.renderer.tokenizer.decode(tokens)


@pytest.fixture(scope="module")
def both(smollm2, tmp_path_factory):
    from vllm_subspec.engine.plugin import register

    register()
    model = scripted.checkpoint(smollm2, tmp_path_factory.mktemp("delivery") / "model")
    ours = Frontend(model, {"tree_width": 2})  # first: the plain one leaves the environment as it was
    made = Both(Frontend(model, None), ours, asyncio.new_event_loop())
    yield made
    made.plain.shutdown()
    made.ours.shutdown()
    made.run(asyncio.sleep(0))
    made.loop.close()


def chat_request(tools: bool = False, **more):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    if tools:
        functions = [{"name": name, "parameters": SCHEMA} for name in NAMES]
        more["tools"] = [{"type": "function", "function": function} for function in functions]
    messages = [{"role": "user", "content": "Hi"}]
    more = {"temperature": 0, "stream_options": {"include_usage": True}, **more}
    return ChatCompletionRequest(model="m", messages=messages, stream=True, **more)


def randomly(seed: int):
    rnd = random.Random(seed)
    return lambda: rnd.randint(1, 17)


@pytest.mark.parametrize("parser", PARSERS)
def test_streams_cut_at_every_token(both, parser):
    """Catches: a parser that is given a burst: a stray ``{}``, lost calls, a shown ``<think>``; wrong usage."""

    async def compare():
        tool, reasoning, said = PARSERS[parser]
        plain, ours = [(await f.serving(tool, reasoning)).openai_serving_chat for f in (both.plain, both.ours)]
        tokens = both.tokens(said)
        for cut in range(1, len(tokens) + 1):
            request = chat_request(tool is not None, max_completion_tokens=cut)
            expected = await both.plain.stream(plain.create_chat_completion, request, [tokens], None)
            request = chat_request(tool is not None, max_completion_tokens=cut)
            burst = randomly(cut) if cut % 2 else lambda: BIG
            assert await both.ours.stream(ours.create_chat_completion, request, [tokens], burst) == expected, cut

    both.run(compare())


@pytest.mark.parametrize("parser", PARSERS)
def test_streams_with_stop_strings_and_scores(both, parser):
    """Catches: tokens after a stop string, scores beside other tokens, text held back or given too early, wrong
    running usage. Every stop string ends inside a burst; some begin in the one before."""

    async def compare():
        tool, reasoning, said = PARSERS[parser]
        plain, ours = [(await f.serving(tool, reasoning)).openai_serving_chat for f in (both.plain, both.ours)]
        tokens = both.tokens(said)
        for at in range(1, len(tokens) - 1, 3):
            more = dict(
                stop=[both.text(tokens[at : at + 2]), "never"], include_stop_str_in_output=at % 4 == 1,
                min_tokens=at // 2, logprobs=True, top_logprobs=2, return_token_ids=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            )  # fmt: skip
            request = chat_request(tool is not None, **more)
            expected = await both.plain.stream(plain.create_chat_completion, request, [tokens], None)
            request = chat_request(tool is not None, **more)
            burst = randomly(at) if at % 2 else lambda: BIG
            got = await both.ours.stream(ours.create_chat_completion, request, [tokens], burst)
            assert got == expected, more["stop"]

    both.run(compare())


def completion(state, **more):
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    more = {"temperature": 0, "stream_options": {"include_usage": True}, "max_tokens": 24, **more}
    request = CompletionRequest(model="m", prompt="Hi", stream=True, **more)
    return state.openai_serving_completion.create_completion, request


def response(state, **more):
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
    more = {"temperature": 0, "max_output_tokens": 60, "tools": tools, **more}
    request = ResponsesRequest(model="m", input="Hi", stream=True, **more)
    return state.openai_serving_responses.create_responses, request


def anthropic_message(state, **more):
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

    tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    more = {"max_tokens": 60, "tools": tools, **more}
    request = AnthropicMessagesRequest(model="m", messages=[{"role": "user", "content": "Hi"}], stream=True, **more)
    return state.anthropic_serving_messages.create_messages, request


SCORED = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": []}

OTHERS = {
    "completion": (completion, {"echo": True}, PLAIN),
    "completion with scores": (completion, {"logprobs": 2, "stop": ["天", " is f"]}, PLAIN),
    "completion held back": (completion, {"stop": ["a long stop string"], "min_tokens": 3}, PLAIN),
    "completion by an id": (completion, {"stop_token_ids": "ids"}, PLAIN),
    "completion by fives": (completion, {"stream_interval": 5}, PLAIN),
    "completion as ids": (completion, {"return_token_ids": True, "return_tokens_as_token_ids": True}, PLAIN),
    "response": (response, {}, THOUGHT + HERMES),
    "cut response": (response, {"max_output_tokens": 52}, THOUGHT + HERMES),
    "response with scores": (response, SCORED, PLAIN),
    "message": (anthropic_message, {}, THOUGHT + HERMES),
    "cut message": (anthropic_message, {"max_tokens": 52}, THOUGHT + HERMES),
}


@pytest.mark.parametrize("case", OTHERS)
def test_streams_of_other_endpoints(both, case):
    """Catches: delivery that only chat completions get; a stream interval of the client lost, or counted in bursts."""

    async def compare():
        ask, more, said = OTHERS[case]
        tokens = both.tokens(said)
        if "stop_token_ids" in more:
            more = {"stop_token_ids": [tokens[-3]]}
        plain, ours = [await f.serving("hermes", "qwen3") for f in (both.plain, both.ours)]
        expected = await both.plain.stream(*ask(plain, **more), [tokens], None)
        assert len(expected) > 4
        for burst in (lambda: BIG, randomly(1), randomly(2)):
            assert await both.ours.stream(*ask(ours, **more), [tokens], burst) == expected

    both.run(compare())


def test_several_choices(both):
    """Catches: tokens given to another choice, a choice ended by another's end."""

    def by_choice(chunks: list) -> dict:
        return {i: [c for c in chunks if c["choices"] and c["choices"][0]["index"] == i] for i in range(3)}

    async def compare():
        tokens = [both.tokens(said) for said in (HERMES, "No.", THOUGHT + HERMES)]
        more = dict(n=3, temperature=1, logprobs=True, max_completion_tokens=40)
        plain, ours = [(await f.serving("hermes", "qwen3")).openai_serving_chat for f in (both.plain, both.ours)]
        create = plain.create_chat_completion, ours.create_chat_completion
        expected = await both.plain.stream(create[0], chat_request(True, **more), tokens, None)
        for burst in (lambda: BIG, randomly(1), randomly(2)):
            got = await both.ours.stream(create[1], chat_request(True, **more), tokens, burst)
            assert by_choice(got) == by_choice(expected)
            assert got[-1] == expected[-1] and got[-1]["usage"]["completion_tokens"] == 80 + len(tokens[1])

    both.run(compare())


def test_without_the_flag_bursts_stay_what_they_are(both):
    """Catches: plain vLLM changed by an engine with subspec beside it; and tests above that cannot fail, because bursts
    do no harm in them."""
    from vllm.v1.engine.output_processor import OutputProcessor

    tokens = both.tokens(HERMES)
    cut = len(both.tokens(HERMES[: HERMES.index("get_time")])) - 1
    assert both.text(tokens[:cut]).endswith('{"name": "')

    async def first_call(burst) -> tuple[int, str]:
        create = (await both.plain.serving("hermes")).openai_serving_chat.create_chat_completion
        chunks = await both.plain.stream(create, chat_request(True, max_completion_tokens=cut), [tokens], burst)
        calls = [call for c in chunks if c["choices"] for call in c["choices"][0]["delta"].get("tool_calls") or []]
        assert {call["index"] for call in calls} == {0}
        return len(chunks), "".join(call["function"].get("arguments") or "" for call in calls)

    arguments = '{"city": "Paris", "days": 3}'
    assert type(both.plain.llm.output_processor) is OutputProcessor
    assert both.run(first_call(None)) > (10, "") and both.run(first_call(None))[1] == arguments
    assert both.run(first_call(lambda: BIG)) == (3, arguments + "{}")  # the role, all tokens, usage


def test_vllms_statistics_stay_by_step(both):
    """Catches: latencies of zero between the tokens of a step; tokens or requests counted twice, or not at all."""

    async def counts(frontend: Frontend) -> list:
        create, request = completion(await frontend.serving(), stop=["fine"], max_tokens=40)
        frontend.stats.clear()
        await frontend.stream(create, request, [both.tokens(PLAIN)], randomly(5))
        await asyncio.sleep(0)
        return [
            [s.num_generation_tokens, len(s.inter_token_latencies_iter), len(s.time_to_first_tokens_iter),
             s.prompt_token_stats.total, [r.num_generation_tokens for r in s.finished_requests]]
            for s in frontend.stats if s is not None
        ]  # fmt: skip

    plain, ours = both.run(counts(both.plain)), both.run(counts(both.ours))
    assert plain == ours
    assert len(plain) > 1 and plain[0][2] == plain[1][1] == 1


def test_a_client_that_leaves_in_the_middle_of_a_burst(both):
    """Catches: a request kept, or its waiting tokens in the answer to the next."""

    async def leave() -> None:
        serving = await both.ours.serving()
        create, request = completion(serving)
        both.ours.engine.tokens, both.ours.engine.burst = [both.tokens(PLAIN)], lambda: 9
        stream = await create(request)
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        expected = await both.plain.stream(*completion(await both.plain.serving()), [both.tokens(HERMES)], None)
        assert await both.ours.stream(*completion(serving), [both.tokens(HERMES)], randomly(1)) == expected
        assert not both.ours.llm.output_processor.has_unfinished_requests()

    both.run(leave())


def test_a_queue_gives_one_delta_a_call():
    """Catches: deltas out of order or lost, a client that sleeps on, an error behind what it takes the place of."""
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.output_processor import RequestOutputCollector

    from vllm_subspec.engine.delivery import TokenQueue

    outputs = [RequestOutput(str(i), None, None, None, [], False) for i in range(6)]

    async def use() -> None:
        queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
        queue.__class__, queue.waiting = TokenQueue, deque()
        asyncio.get_running_loop().call_soon(lambda: [queue.put(o) for o in outputs[:4]])
        assert await queue.get() is outputs[0]
        assert queue.get_nowait() is outputs[1]
        queue.put(outputs[4])
        assert [queue.get_nowait(), await queue.get(), queue.get_nowait(), queue.get_nowait()] == [*outputs[2:5], None]
        for output in (*outputs[:3], ValueError("stopped")):
            queue.put(output)
        with pytest.raises(ValueError, match="stopped"):
            await queue.get()
        queue.put(outputs[5])
        assert [queue.get_nowait(), queue.get_nowait()] == [outputs[5], None]

    asyncio.run(use())


def test_a_split_step_loses_nothing():
    """Catches: a field of a step's output that no token brings, that several do, or that comes with the wrong one."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

    from vllm_subspec.engine.delivery import AT_THE_END, one_token_each

    by_token = {"new_token_ids", "new_logprobs", "new_sampling_mask"}
    of_all = {"request_id", "trace_headers"}
    step = EngineCoreOutput("r", [5, 6, 7])
    for field in msgspec.structs.fields(step):  # a value of its own for each: none is looked into
        if field.name not in by_token | of_all:
            setattr(step, field.name, f"<{field.name}>")
    step.finish_reason, step.trace_headers = FinishReason.STOP, {"a": "b"}
    step.new_logprobs = LogprobsLists(np.arange(6).reshape(3, 2), np.arange(6.0).reshape(3, 2), np.arange(3))
    step.new_sampling_mask = SamplingMaskLists(np.arange(6), np.array([0, 1, 3, 6]))
    parts = one_token_each(step)
    assert [p.new_token_ids for p in parts] == [[5], [6], [7]]
    for rows in (0, 1, 2):
        assert np.array_equal(np.concatenate([p.new_logprobs[rows] for p in parts]), step.new_logprobs[rows])
    assert [p.new_sampling_mask.to_nested_list() for p in parts] == [[[0]], [[1, 2]], [[3, 4, 5]]]
    for field in msgspec.structs.fields(step):
        if field.name not in by_token:
            found = [i for i, p in enumerate(parts) if getattr(p, field.name) == getattr(step, field.name)]
            at = [2] if field.name in AT_THE_END else [0, 1, 2] if field.name in of_all else [0]
            assert found == at, field.name
