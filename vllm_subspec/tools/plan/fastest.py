"""The plan of the most tokens a second, where that is not the one with the most resident layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .advise import Placement, Plan, placements
from .memory import offloaded_memory
from .speed import Bandwidth, expect


def fastest_plan(plan: Plan, pcie: Bandwidth, gpu: Bandwidth, any_substitutes: bool = True) -> Plan:
    """The plan of the shortest round, by `speed.expect`, and of equal ones that with the most resident layers.

    Besides resident layers it weighs two other uses of GPU memory. Prefetch slots beyond two fill while the draft runs,
    so that the pass has fewer layers left to stream; and a resident layer with a substitute makes the draft read a
    quarter of its bytes. tau is taken for the same, though a draft with fewer exact layers may be accepted a little
    less. Not compared with measurements yet.

    Args:
        plan: of `make_plan`, for the same model, run and memory
        any_substitutes: whether resident layers may get substitutes as well, or only as ``plan.run`` says
    """
    if plan.placement is None:
        return plan

    def rank(candidate: Plan) -> tuple[float, int]:
        return expect(candidate, pcie, gpu, []).t_round, len(candidate.offloaded)

    return min([plan, *_candidates(plan, any_substitutes)], key=rank)


def _candidates(plan: Plan, any_substitutes: bool) -> Iterator[Plan]:
    """What fits: each number of streamed layers by its smallest group, with each number of slots."""
    num_layers = len(plan.model.layers)
    by_count: dict[int, Placement] = {}
    for placement in placements(num_layers):
        by_count.setdefault(len(placement.offloaded(num_layers)), placement)
    for run in (plan.run, replace(plan.run, substitute_all=True)) if any_substitutes else (plan.run,):
        for streamed, placement in by_count.items():
            for step in range(1, streamed + 1):
                memory = offloaded_memory(plan.model, run, placement.offloaded(num_layers), step)
                if memory.total > plan.vram:
                    break  # more slots take more
                yield replace(plan, run=run, placement=replace(placement, prefetch_step=step), memory=memory)
