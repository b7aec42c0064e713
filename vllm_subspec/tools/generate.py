"""One chat request through a vLLM engine, with the rounds that produced it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import LLM


@dataclass
class Generation:
    """What one request emitted and how."""

    tokens: list[int]
    text: str
    seconds: float
    """From the request to its last token, prefill included"""
    rounds: list[dict]
    """`vllm_subspec.engine.stats.RoundRecord` of each step after the prefill; empty on a plain engine"""
    first_token_seconds: float
    """From the request to its first token"""
    emitted: list[int]
    """Tokens of each pass that emitted any, as the engine sent them; the first pass is the prefill's last"""
    prompt_tokens: int

    @property
    def passes(self) -> int:
        """Target passes after the prefill."""
        return len(self.emitted) - 1

    @property
    def acceptance_length(self) -> float:
        """tau: tokens emitted by the passes, the last pass counted whole, over passes."""
        if not self.rounds:
            return 1.0
        return sum(r["accepted"] + 1 for r in self.rounds) / len(self.rounds)


def start_engine(model: str, speculative_config: dict | None = None, **engine_args) -> LLM:
    """A vLLM engine, plain or with ``speculative_config``."""
    from vllm import LLM

    return LLM(model, speculative_config=speculative_config, **engine_args)


def stop_engine(llm: LLM) -> None:
    """End the engine's processes and free what it held."""
    llm.llm_engine.engine_core.shutdown()


def encode_chat(tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation to continue: by the chat template, or as plain text where there is none."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode("\n\n".join(m["content"] for m in messages)))
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def generate(
    llm: LLM,
    prompt: str | list[dict[str, str]],
    max_tokens: int,
    speculative: bool,
    on_text: Callable[[str], None] | None = None,
    temperature: float = 0.0,
    seed: int | None = None,
) -> Generation:
    """Answer one user message, or the last one of a conversation.

    Args:
        prompt: a user message, or messages with ``role`` and ``content``
        speculative: whether the engine runs with subspec
        on_text: is called with each piece of text as it arrives
        temperature: 0 is greedy
        seed: of a sampled request
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    encoded = encode_chat(llm.get_tokenizer(), messages)
    params = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA
    )
    engine, tokens, text, emitted, first = llm.llm_engine, [], "", [], 0.0
    started = time.perf_counter()
    engine.add_request(f"subspec-{started}", {"prompt_token_ids": encoded}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            piece = output.outputs[0]
            if piece.token_ids:
                emitted.append(len(piece.token_ids))
                first = first or time.perf_counter() - started
            tokens += piece.token_ids
            text += piece.text
            if on_text is not None:
                on_text(piece.text)
    seconds = time.perf_counter() - started
    # A long prompt is prefilled in several steps: what came after them is the tail.
    rounds = llm.collective_rpc("subspec_rounds")[0] if speculative else []
    rounds = rounds[len(rounds) - (len(emitted) - 1) :]
    return Generation(tokens, text, seconds, rounds, first, emitted, len(encoded))
