"""vLLM's front end, whole and real, over an engine that plays tokens from a script.

What a client of the OpenAI server reads is made in the front end: by vLLM's AsyncLLM, its output processor, its serving
layers and their parsers. Here the engine behind it runs no model: it emits the tokens that it is told, so many a step
as it is told, and ends a request as vLLM's scheduler does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from starlette.datastructures import State

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
"""What parsers want as single tokens"""
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
RANDOM = {
    "id", "item_id", "call_id", "request_id", "created", "created_at", "completed_at", "signature", "system_fingerprint",
}  # fmt: skip
"""Keys whose values differ from answer to answer, or from server to server"""


def checkpoint(tokenizer_of: str, out) -> str:
    """Write a checkpoint without weights: that tokenizer with the marks, and a tiny model's config."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_of)
    tokenizer.add_tokens(list(MARKS))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(out)
    transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, architectures=["LlamaForCausalLM"],
    ).save_pretrained(out)  # fmt: skip
    return str(out)


class ScriptedEngine:
    """In place of vLLM's client of its engine process."""

    engine_ranks_managed = [0]

    def __init__(self, vllm_config):
        self.max_model_len = vllm_config.model_config.max_model_len
        self.resources = SimpleNamespace(engine_dead=False)
        self.turns: asyncio.Queue = asyncio.Queue()
        """Requests under way and the tokens that they have still to emit, each taking one step a turn"""
        self.aborted: set[str] = set()
        self.tokens: list[list[int]] = []
        """What the next request emits, a list for each of its choices"""
        self.burst: Callable[[], int] = lambda: 1
        """Tokens of the next step"""
        self.delivered: Callable[[], bool] = lambda: True
        """Whether the next step may come"""

    async def get_supported_tasks_async(self):
        return ("generate",)

    async def add_request_async(self, request) -> None:
        from vllm.v1.request import Request

        # vLLM's ids of the choices of one request begin with the choice's number.
        choice = int(request.request_id.split("_")[0]) if len(self.tokens) > 1 else 0
        await self.turns.put((Request.from_engine_core_request(request, None), list(self.tokens[choice])))

    async def abort_requests_async(self, request_ids) -> None:
        self.aborted.update(request_ids)

    async def get_output_async(self):
        from vllm.v1.engine import EngineCoreOutputs

        request, tokens = await self.turns.get()
        while not self.delivered():
            await asyncio.sleep(0)
        if request.request_id in self.aborted:
            return EngineCoreOutputs()
        output = self._step(request, tokens)
        if not request.is_finished():
            self.turns.put_nowait((request, tokens))
        return EngineCoreOutputs(outputs=[output])

    def _step(self, request, tokens: list[int]):
        """What `Scheduler.update_from_output` makes of a step that emits the next tokens."""
        from vllm.v1.core.sched.utils import check_stop
        from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput
        from vllm.v1.metrics.stats import PrefillStats
        from vllm.v1.outputs import LogprobsLists

        first, new = not request.num_output_tokens, []
        for _ in range(self.burst()):
            new.append(tokens.pop(0))
            request.append_output_token_ids(new[-1])
            if check_stop(request, self.max_model_len):
                break
        logprobs = None
        if (count := request.sampling_params.num_logprobs) is not None:
            ids = np.array([[t, *((t + 7 * i) % 40000 + 3 for i in range(count))] for t in new])
            logprobs = LogprobsLists(ids, -ids / 1000.0, np.array([t % 9 + 1 for t in new]))
        stats = PrefillStats()
        stats.set(request.num_prompt_tokens, 0, 0)
        events = [EngineCoreEvent.new_event(k) for k in (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)]
        return EngineCoreOutput(
            request.request_id, new, new_logprobs=logprobs, finish_reason=request.get_finished_reason(),
            stop_reason=request.stop_reason, prefill_stats=stats if first else None, events=events if first else None,
        )  # fmt: skip

    def shutdown(self, timeout=None) -> None:
        pass


class Frontend:
    """An AsyncLLM over a scripted engine, and the serving layers that ``vllm serve`` puts before it."""

    def __init__(self, model: str, spec: dict | None, **engine):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine import async_llm

        arguments = dict(dtype="float32", max_model_len=512, max_num_batched_tokens=512, enforce_eager=True, **engine)
        if spec is not None:
            arguments["speculative_config"] = {"method": "subspec", **spec}
        config = AsyncEngineArgs(model, **arguments).create_engine_config()
        client = SimpleNamespace(make_async_mp_client=lambda vllm_config, **_: ScriptedEngine(vllm_config))
        with mock.patch.object(async_llm, "EngineCoreClient", client):
            self.llm = async_llm.AsyncLLM.from_vllm_config(config)
        self.engine: ScriptedEngine = self.llm.engine_core
        self.model = model
        self.stats: list = []
        """vLLM's statistics of each step"""
        self.llm.logger_manager = SimpleNamespace(
            record=lambda iteration_stats, **_: self.stats.append(iteration_stats)
        )

    async def serving(self, tool_call_parser: str | None = None, reasoning_parser: str = "") -> State:
        """The state of an API server with these parsers."""
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        words = ["--model", self.model, "--served-model-name", "m"]
        if tool_call_parser:
            words += ["--enable-auto-tool-choice", "--tool-call-parser", tool_call_parser]
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
        args.structured_outputs_config.reasoning_parser = reasoning_parser
        state = State()
        await init_app_state(self.llm, state, args, ("generate",))
        return state

    async def stream(self, create: Callable, request: Any, tokens: list[list[int]], burst: Callable[[], int]) -> list:
        """The chunks of a streamed answer, as JSON; of what is random in them, only that it is there.

        Args:
            create: the method of a serving layer that answers such requests
            tokens: what each choice emits if nothing ends it
            burst: gives the number of tokens of each step. Without: one, and each step waits until the client has
                read the one before, so that vLLM merges nothing.
        """

        def all_read() -> bool:
            return all(state.queue.output is None for state in self.llm.output_processor.request_states.values())

        self.engine.tokens = tokens
        self.engine.burst, self.engine.delivered = (burst, lambda: True) if burst else (lambda: 1, all_read)
        chunks = [chunk async for chunk in await create(request)]
        if isinstance(chunks[0], str):  # server-sent events
            data = [line.removeprefix("data: ") for c in chunks for line in c.split("\n") if line.startswith("data: ")]
            return [without_random(json.loads(d)) for d in data if d != "[DONE]"]
        return [without_random(chunk.model_dump(mode="json")) for chunk in chunks]

    def shutdown(self) -> None:
        self.llm.shutdown()


def without_random(value: Any) -> Any:
    """JSON with only the presence of what is random."""
    if isinstance(value, dict):
        return {k: v is not None if k in RANDOM else without_random(v) for k, v in value.items()}
    return [without_random(v) for v in value] if isinstance(value, list) else value
