"""Which decoder layers stay on the GPU, and the flags of vLLM that say so."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from ..sizes import MIB, capped, gib
from . import SPECULATIVE_CONFIG
from .memory import Memory, Run, offloaded_memory, plain_memory, without_kernel
from .model import Model

SUBSTITUTE_ALL = '{"method":"subspec","substitute_layers":"all"}'
NO_COMPILATION = '{"mode":0}'
"""A streamed pass waits for PCIe, compiled or not. And while Inductor tunes its kernels, the first start needs as much
memory again as the embedding has (1 GiB for Qwen2.5-7B), which vLLM then keeps from the KV cache."""
CHUNK_STEP = 256
"""Prefill chunks are the smallest multiple of this that holds a tree: 256 is the paper's, and every row costs memory"""


class DoesNotFit(ValueError):
    """No placement of the layers is small enough."""


@dataclass(frozen=True)
class Placement:
    """Layer i is offloaded if i % group_size >= group_size - num_in_group (vLLM's PrefetchOffloader.wrap_modules)."""

    group_size: int
    num_in_group: int
    prefetch_step: int

    def offloaded(self, num_layers: int) -> tuple[int, ...]:
        return tuple(i for i in range(num_layers) if i % self.group_size >= self.group_size - self.num_in_group)


@dataclass(frozen=True)
class Plan:
    model: Model
    run: Run
    vram: int
    """Bytes that the engine process may use, CUDA context included"""
    gpu_total: int
    """Bytes of the whole GPU"""
    gpu_is_assumed: bool
    """No GPU was asked: vram is taken to be all of it"""
    placement: Placement | None
    """None: every layer is resident, and plain vLLM does the work"""
    memory: Memory

    @property
    def offloaded(self) -> tuple[int, ...]:
        return self.placement.offloaded(len(self.model.layers)) if self.placement else ()

    @property
    def without_kernel(self) -> str | None:
        """See `memory.without_kernel`."""
        layers = self.model.layers
        if not self.run.substitute_all:
            layers = [layers[i] for i in self.offloaded]
        return without_kernel(layers, self.run) if self.placement else None

    @property
    def offloaded_bytes(self) -> int:
        """What every target pass streams."""
        return sum(self.model.layers[i].parameters for i in self.offloaded) * self.run.itemsize

    @property
    def gpu_memory_utilization(self) -> float:
        """The share of the GPU that vLLM may fill with weights, profiled activations, graphs and KV cache.

        vram less what comes on top of that share: the CUDA context, which exists before vLLM's first reading, and the
        draft's graph, captured when the KV cache has its size. The logits of a tree are inside: the worker has them
        profiled. Rounded down to 5 digits.
        """
        share = (self.vram - self.memory.cuda_context - self.memory.cuda_graphs) / self.gpu_total
        return math.floor(share * 1e5) / 1e5

    def flags(self, dtype: str) -> dict[str, list[str]]:
        """Options of `vllm serve` that realise the plan, with their values."""
        flags = {"--dtype": [dtype]}
        if self.placement:
            flags |= {
                "--offload-backend": ["prefetch"],
                "--offload-group-size": [str(self.placement.group_size)],
                "--offload-num-in-group": [str(self.placement.num_in_group)],
                "--offload-prefetch-step": [str(self.placement.prefetch_step)],
            }
        flags |= {
            "--gpu-memory-utilization": [f"{self.gpu_memory_utilization:.5f}"],
            "--max-model-len": [str(self.run.context)],
            "--max-num-seqs": ["1"],
            "--max-num-batched-tokens": [str(self.run.chunk)],
        }
        if self.placement:
            spec = SUBSTITUTE_ALL if self.run.substitute_all else SPECULATIVE_CONFIG
            return {**flags, "--compilation-config": [NO_COMPILATION], "--speculative-config": [spec]}
        if self.memory.total + self.memory.embedding > self.vram:
            return {**flags, "--compilation-config": [NO_COMPILATION]}
        # A decoding step's graph, instead of about fifty; each costs memory.
        return {**flags, "--cudagraph-capture-sizes": ["1"]}

    def summary(self) -> str:
        """One line."""
        layers, streamed = len(self.model.layers), len(self.offloaded)
        if not streamed:
            fits = f"{self.model.name}: all {layers} layers fit in {gib(self.vram)}, nothing is offloaded"
            return f"{fits}; plain vLLM is likely the faster choice"
        slots = f" through {self.placement.prefetch_step} slots" if self.placement.prefetch_step > 2 else ""
        every = ", substitutes for all" if self.run.substitute_all else ""
        return (
            f"{self.model.name}: {layers - streamed} of {layers} layers resident, {streamed} streamed{slots}{every}; "
            f"{gib(self.memory.total)} planned of {gib(self.vram)}"
        )


def default_context(model: Model) -> int:
    return min(Run.context, model.max_positions)


def chunk_for(tree_rows: int) -> int:
    """max_num_batched_tokens for trees of so many rows."""
    return -(-tree_rows // CHUNK_STEP) * CHUNK_STEP


def placements(num_layers: int) -> Iterator[Placement]:
    """Each set of offloaded layers that vLLM's two numbers can say, once, by its smallest group, with 2 and 1 slots.

    A small group spreads the streamed layers, so that resident ones compute while the next streamed one arrives.
    """
    seen = set()
    for group_size in range(1, num_layers + 1):
        for num_in_group in range(1, group_size + 1):
            placement = Placement(group_size, num_in_group, 2)
            if (offloaded := placement.offloaded(num_layers)) not in seen:
                seen.add(offloaded)
                yield placement
                yield Placement(group_size, num_in_group, 1)


def make_plan(model: Model, run: Run, vram: int, gpu_total: int | None = None) -> Plan:
    """The plan that keeps the most layers resident: then the one with more prefetch slots, then the smallest group.

    Args:
        vram: bytes the engine process may use (see `sizes.capped`)
        gpu_total: bytes of the whole GPU; ``vram`` if not given

    Raises:
        DoesNotFit: the sentence says the smallest VRAM that would do.
        ValueError: a context that the model does not have, or a VRAM that the GPU does not have.
    """
    beyond = model.scaled_rope or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").lower() in ("1", "true")
    if run.context > model.max_positions and not beyond:
        raise ValueError(f"a context of {run.context} exceeds the {model.max_positions} positions of {model.name}")
    if run.tree_rows > run.chunk:
        raise ValueError(
            f"a tree of {run.tree_width} x {run.tree_depth} needs {run.tree_rows} tokens a step but "
            f"max_num_batched_tokens is {run.chunk}; raise it, or lower the tree's width or depth"
        )
    vram = vram if gpu_total is None else capped(vram, gpu_total)
    num_layers = len(model.layers)
    total, assumed = (vram, True) if gpu_total is None else (gpu_total, False)
    plain = plain_memory(model, run)
    if plain.total <= vram:
        return Plan(model, run, vram, total, assumed, None, plain)

    best, smallest = None, plain.total
    for placement in placements(num_layers):
        offloaded = placement.offloaded(num_layers)
        memory = offloaded_memory(model, run, offloaded, placement.prefetch_step)
        smallest = min(smallest, memory.total)
        if memory.total <= vram:
            rank = (num_layers - len(offloaded), placement.prefetch_step, -placement.group_size)
            if best is None or rank > best[0]:
                best = (rank, Plan(model, run, vram, total, assumed, placement, memory))
    if best is None:
        needed = -(-smallest // MIB)
        remark = without_kernel(model.layers, run)
        raise DoesNotFit(
            f"{model.name} does not fit in {gib(vram)} with a context of {run.context}; "
            f"the smallest VRAM that would do is {needed}MiB ({gib(needed * MIB)}){f'; {remark}' if remark else ''}"
        )
    return best[1]
