"""A custom logits processor for vLLM's V2 runner whose verdict depends on the tokens before."""

from __future__ import annotations

from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor


class NoNeighbours(LogitsProcessor):
    """No token may follow one whose id is near its own, nor the two tokens before that one: by committed tokens and,
    under speculation, by the rows of the same request before."""

    def __init__(self, vllm_config, req_states):
        self.req_states = req_states

    def apply(self, logits, ctx):
        for row in range(logits.shape[0]):
            slot, local = int(ctx.expanded_idx_mapping[row]), int(ctx.expanded_local_pos[row])
            done = self.req_states.all_token_ids.gpu[slot, : int(ctx.pos[row]) + 1 - local].tolist()
            drafted = ctx.input_ids[row - local + 1 : row + 1].tolist()
            for token in [*done, *drafted][-3:]:
                logits[row, max(0, token - 20) : token + 20] = float("-inf")
        return logits


class Witness(LogitsProcessor):
    """Changes nothing and notes how it is called: of each call and request its rows' offsets and their positions, counted
    from its last committed token."""

    def __init__(self, vllm_config, req_states):
        self.req_states = req_states
        self.calls: list[list[tuple[list[int], list[int]]]] = []

    def apply(self, logits, ctx):
        assert logits.shape[0] == len(ctx.expanded_idx_mapping) == len(ctx.pos) == len(ctx.input_ids)
        call = []
        for slot in ctx.idx_mapping.tolist():
            rows = ctx.expanded_idx_mapping == slot
            last = int(self.req_states.total_len.gpu[slot]) - 1
            call.append((ctx.expanded_local_pos[rows].tolist(), (ctx.pos[rows] - last).tolist()))
        self.calls.append(call)
        return logits
