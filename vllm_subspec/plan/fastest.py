"""The plan of the most tokens a second, where that is not the one with the most resident layers."""

from __future__ import annotations

from dataclasses import replace

from .advise import Placement, Plan, make_plan, placements
from .memory import Run, offloaded_memory
from .model import Model
from .speed import Bandwidth, expect


def fastest_plan(
    model: Model,
    run: Run,
    vram: int,
    gpu_total: int | None,
    pcie: Bandwidth,
    gpu: Bandwidth,
    any_substitutes: bool = True,
) -> Plan:
    """The plan of the shortest round, by `speed.expect`, and of equal ones that with the most resident layers.

    Besides resident layers it weighs two other uses of GPU memory. Prefetch slots beyond two fill while the draft runs,
    so that the pass has fewer layers left to stream; and a resident layer with a substitute makes the draft read a
    quarter of its bytes. tau is taken for the same, though a draft with fewer exact layers may be accepted a little
    less. Not compared with measurements yet.

    Args:
        vram, gpu_total: as of `make_plan`
        any_substitutes: whether resident layers may get substitutes as well, or only as ``run`` says

    Raises:
        DoesNotFit, ValueError: as `make_plan`
    """
    best = make_plan(model, run, vram, gpu_total)
    if best.placement is None:
        return best

    def rank(plan: Plan) -> tuple[float, int]:
        return expect(plan, pcie, gpu, []).t_round, len(plan.offloaded)

    num_layers = len(model.layers)
    by_count: dict[int, Placement] = {}
    for placement in placements(num_layers):
        by_count.setdefault(len(placement.offloaded(num_layers)), placement)
    for chosen in (run, replace(run, substitute_all=True)) if any_substitutes else (run,):
        for streamed, placement in by_count.items():
            for step in range(1, streamed + 1):
                memory = offloaded_memory(model, chosen, placement.offloaded(num_layers), step)
                if memory.total > vram:
                    break  # more slots take more
                plan = replace(best, run=chosen, placement=replace(placement, prefetch_step=step), memory=memory)
                best = min(best, plan, key=rank)
    return best
