"""What a user may name on vLLM's command line by module and class."""

from __future__ import annotations

from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor


class OddAfterEven(LogitsProcessor):
    """After an even token comes an odd one: every node of a tree has a mask of its own."""

    def apply(self, logits, ctx):
        logits[:, ::2].masked_fill_((ctx.input_ids[:, None] % 2 == 0), float("-inf"))
        return logits


class Worker:
    """A worker extension."""

    def two(self) -> int:
        return 2
