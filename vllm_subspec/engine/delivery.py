"""Hands the tokens of a round to streaming clients one at a time, as plain decoding brings them.

A round emits many tokens at once. vLLM's front end would pass them on as one delta, and its streaming parsers of tool
calls and reasoning take paths then that single tokens never reach: a call's arguments grow a stray ``{}``, whole calls
are lost, a ``<think>`` is shown. So what a step brings is split before vLLM detokenizes it, and the deltas are kept
apart until the client takes them. This happens in the front end's process; no token waits for a later step.
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

AT_THE_END = ("finish_reason", "stop_reason", "kv_transfer_params", "ec_transfer_params")
"""Fields that say how a request ended, and so come with its last token"""


def one_token_each(output: EngineCoreOutput) -> list[EngineCoreOutput]:
    """A step's output of several tokens as that many of one.

    The first has what concerns the prompt or the request, metrics too (a stop string may end it before the last token);
    the last has its end.
    """

    def only(i: int) -> dict:
        rows = {name: getattr(output, name) for name in ("new_logprobs", "new_sampling_mask")}
        sliced = {name: None if value is None else value.slice_request(i, 1) for name, value in rows.items()}
        return {"new_token_ids": [output.new_token_ids[i]], **sliced}

    steps = [replace(output, **only(0), **dict.fromkeys(AT_THE_END))]
    for i in range(1, len(output.new_token_ids)):
        steps.append(EngineCoreOutput(output.request_id, trace_headers=output.trace_headers, **only(i)))
    for name in AT_THE_END:
        setattr(steps[-1], name, getattr(output, name))
    return steps


class TokenQueue(RequestOutputCollector):
    """A request's deltas, one a call, where vLLM's queue merges those that wait."""

    waiting: deque
    """What comes after ``output``, oldest first; empty if that is None"""

    def put(self, output) -> None:
        if isinstance(output, Exception):  # takes the place of all that was not fetched, as in vLLM's
            self.waiting.clear()
        elif self.output is not None:
            self.waiting.append(output)
            return
        super().put(output)

    async def get(self):
        return self._and_advance(await super().get())

    def get_nowait(self):
        return self._and_advance(super().get_nowait())

    def _and_advance(self, output):
        if self.waiting:
            super().put(self.waiting.popleft())
        return output


class TokenByToken(OutputProcessor):
    """vLLM's output processor, given single tokens of the requests whose clients read deltas from a queue."""

    def add_request(self, request, prompt, parent_req=None, request_index=0, queue=None) -> None:
        # AsyncLLM makes the queue and keeps it: this very object must become ours, before anything is put in.
        if type(queue) is RequestOutputCollector and queue.aggregate:
            queue.__class__, queue.waiting = TokenQueue, deque()
        super().add_request(request, prompt, parent_req, request_index, queue)

    def process_outputs(
        self, engine_core_outputs, engine_core_timestamp=None, iteration_stats=None, weight_version=None
    ):
        steps: list[EngineCoreOutput] = []
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is None:  # aborted meanwhile
                continue
            # Statistics are of steps, as with vLLM's own speculative methods: a token of a burst has no latency.
            super()._update_stats_from_output(state, output, engine_core_timestamp, iteration_stats)
            several = len(output.new_token_ids) > 1 and isinstance(state.queue, TokenQueue)
            steps += one_token_each(output) if several else [output]
        return super().process_outputs(steps, engine_core_timestamp, iteration_stats, weight_version)

    def _update_stats_from_output(self, *args) -> None:
        """Done, before the outputs were split."""
