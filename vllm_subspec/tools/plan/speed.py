"""What speed to expect of a plan, from two bandwidths and the paper's formula."""

from __future__ import annotations

from dataclasses import dataclass

from .advise import Plan
from .gpu import Gpu, this_gpu

GB = 10**9
ASSUMED_PCIE = 25 * GB
"""Pinned copies over PCIe 4.0 x16"""
ASSUMED_GPU = 1000 * GB
"""An RTX 4090's, rounded"""
LAYER_SECONDS = 67e-6
"""What a layer of a draft pass takes besides its weights: 2.04 ms a pass of 30 layers whose weights are next to nothing
(examples/results/h200-smollm2-prefetch.json)."""
VERIFICATION_ROWS, VERIFICATION_READS = 289, 2.0
"""A pass over a tree of so many rows, in times of reading the weights once: GPUs do 150 to 200 operations a byte that
they read, and a row asks for one. Where layers are streamed the stream hides it: gamma was 0.94 with 28 of 30 layers
left to stream (examples/results/h200-padded-12gb-prefetch.json)."""
PROMPT = 1000
"""Tokens of the prompt whose first token is estimated"""
MEASURED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Bandwidth:
    bytes_per_second: float
    source: str
    """given, measured or assumed"""


@dataclass(frozen=True)
class Expectation:
    """Seconds, and for each tau tokens a second and the speedup over plain decoding with the same flags."""

    t_target: float
    t_draft: float
    t_verify: float
    t_round: float
    """A draft and its verification, which emit tau tokens"""
    t_first: float
    """To the first token of a prompt of `PROMPT` tokens"""
    by_tau: dict[float, tuple[float, float]]


def bandwidths(pcie: float | None, gpu: float | None) -> tuple[Bandwidth, Bandwidth]:
    """Host to GPU, and GPU memory: given, else measured on the GPU that is there, else assumed.

    Args:
        pcie, gpu: GB/s, None to find out
    """
    import torch

    measured = measure() if torch.cuda.is_available() and None in (pcie, gpu) else (None, None)
    return _chosen(pcie, measured[0], ASSUMED_PCIE), _chosen(gpu, measured[1], ASSUMED_GPU)


def survey() -> tuple[Gpu | None, tuple[Bandwidth, Bandwidth]]:
    """The GPU that is there, and its bandwidths."""
    return this_gpu(), bandwidths(None, None)


def _chosen(given: float | None, measured: float | None, assumed: float) -> Bandwidth:
    if given is not None:
        return Bandwidth(given * GB, "given")
    return Bandwidth(assumed, "assumed") if measured is None else Bandwidth(measured, "measured")


def measure() -> tuple[float, float]:
    """Bytes a second of a copy from pinned memory to the GPU, and of reading and writing GPU memory: best of three."""
    import torch

    host = torch.empty(MEASURED_BYTES, dtype=torch.uint8, pin_memory=True)
    device, other = (torch.empty(MEASURED_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))

    def seconds(target: torch.Tensor, source: torch.Tensor) -> float:
        taken = []
        for _ in range(4):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1000)
        return min(taken[1:])  # the first is a warm-up

    return MEASURED_BYTES / seconds(device, host), 2 * MEASURED_BYTES / seconds(other, device)


def expect(plan: Plan, pcie: Bandwidth, gpu: Bandwidth, taus: list[float]) -> Expectation:
    """Times of one round at batch 1, and tokens/s = tau / (D t_draft + t_verify): of trees of full depth. Drafts that
    end early (``confidence_threshold``) take less.

    t_target = offloaded bytes / PCIe bandwidth, at least the time to read all layers and the head from GPU memory.
    t_draft  = (what the draft reads + head) / GPU bandwidth + `LAYER_SECONDS` a layer. The draft reads substitutes, and
               resident layers that have none.
    t_verify = the same stream less what came into the prefetch slots while the draft ran, at least
               `VERIFICATION_READS` times reading all layers and the head.
    t_first  = a pass for each chunk of the prompt: the stream, or computing its rows at the rate of a verification.
    With every layer resident there is no draft: t_draft, t_verify and t_round are 0 and `by_tau` is empty.
    """
    model, itemsize, memory = plan.model, plan.run.itemsize, plan.memory
    head = (model.head or model.embedding) * itemsize
    stream = plan.offloaded_bytes / pcie.bytes_per_second
    read = (sum(layer.parameters for layer in model.layers) * itemsize + head) / gpu.bytes_per_second
    t_target = max(stream, read)
    chunks = [min(plan.run.chunk, PROMPT - start) for start in range(0, PROMPT, plan.run.chunk)]
    t_first = sum(max(t_target, VERIFICATION_READS * rows / VERIFICATION_ROWS * read) for rows in chunks)
    if not plan.placement:
        return Expectation(t_target, 0.0, 0.0, 0.0, t_first, {})
    drafted = memory.substitutes + (0 if plan.run.substitute_all else memory.resident_layers) + head
    t_draft = drafted / gpu.bytes_per_second + LAYER_SECONDS * len(model.layers)
    drafting = plan.run.tree_depth * t_draft
    ahead = min(stream * plan.placement.prefetch_step / len(plan.offloaded), drafting, stream)
    t_verify = max(stream - ahead, VERIFICATION_READS * read)
    t_round = drafting + t_verify
    by_tau = {tau: (tau / t_round, tau * t_target / t_round) for tau in taus}
    return Expectation(t_target, t_draft, t_verify, t_round, t_first, by_tau)
