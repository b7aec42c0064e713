"""One greedy chat request through a vLLM engine, with the rounds that produced it."""

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
    """`vllm_subspec.stats.Round` of each step after the prefill; empty on a plain engine"""
    logprobs: list[dict[int, float]]
    """Of each token the likeliest alternatives, if they were asked for"""

    @property
    def passes(self) -> int:
        """Target passes after the prefill."""
        return len(self.rounds) if self.rounds else len(self.tokens) - 1

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


def generate(
    llm: LLM,
    prompt: str,
    max_tokens: int,
    speculative: bool,
    on_text: Callable[[str], None] | None = None,
    logprobs: int | None = None,
) -> Generation:
    """Answer one user message greedily.

    Args:
        speculative: whether the engine runs with subspec
        on_text: is called with each piece of text as it arrives
        logprobs: how many alternatives to report for each token (such a request is not speculated)
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    encoded = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA, logprobs=logprobs
    )
    engine, tokens, text, alternatives = llm.llm_engine, [], "", []
    started = time.perf_counter()
    engine.add_request(f"subspec-{started}", {"prompt_token_ids": list(encoded)}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            piece = output.outputs[0]
            tokens += piece.token_ids
            text += piece.text
            alternatives += [{t: entry.logprob for t, entry in top.items()} for top in piece.logprobs or []]
            if on_text is not None:
                on_text(piece.text)
    seconds = time.perf_counter() - started
    rounds = llm.collective_rpc("subspec_rounds")[0][1:] if speculative else []
    return Generation(tokens, text, seconds, rounds, alternatives)
