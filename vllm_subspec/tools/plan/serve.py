"""The plan of a server: under the options of `vllm serve` that the user gave."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import Any

from ..sizes import GIB
from . import SPECULATIVE_CONFIG
from .advise import Plan, chunk_for, default_context, make_plan
from .fastest import fastest_plan
from .gpu import Gpu
from .memory import CUDA_CONTEXT, CUDA_GRAPHS, Run, plain_memory
from .model import load_model
from .report import ITEMSIZES
from .speed import Bandwidth

DTYPES = {"auto": "bfloat16", "half": "float16", "float": "float32", **{name: name for name in ITEMSIZES}}
LARGE_GPU = 70 * GIB
"""From here on vLLM's defaults are larger (EngineArgs.get_batch_defaults)"""
DEFAULT_GRAPHS = GIB
"""CUDA graphs that vLLM captures by default, about fifty"""
DEFAULT_UTILIZATION = 0.92


def speculation(args: Namespace) -> dict[str, Any]:
    """The user's speculative config, of all options that say a part of it; empty if there is none."""
    given = args.speculative_config or {}
    if not isinstance(given, dict):
        raise ValueError(f"--speculative-config takes a JSON object, as {SPECULATIVE_CONFIG}")
    spec = {key.replace("-", "_"): value for key, value in given.items()}
    return spec | {k: v for k, v in (("method", args.spec_method), ("model", args.spec_model)) if v is not None}


def is_subspec(spec: dict[str, Any]) -> bool:
    """Whether a speculative config is of this method, or leaves it open."""
    return spec.get("method") == "subspec" or not spec.keys() & {"method", "model"}


def plan_for(
    args: Namespace, given: set[str], vram: int, gpu: Gpu | None, links: tuple[Bandwidth, Bandwidth], fastest: bool
) -> Plan:
    """The plan under the user's own options.

    Args:
        args: options of `vllm serve`
        given: names of those that the user gave
        vram: bytes that the engine process may use
        fastest: the plan of `fastest_plan`, else that with the most resident layers

    Raises:
        FileNotFoundError, ValueError: see `report.run_plan`; and options that leave nothing to plan.
    """
    spec = speculation(args)
    if not is_subspec(spec):
        raise ValueError("--vram plans for method subspec; remove it, or set the method to subspec")
    for key in ("tree_width", "tree_depth", "substitute_group_size"):
        if key in spec and not (isinstance(spec[key], int) and spec[key] > 0):
            raise ValueError(f"{key} takes a whole number above zero, not {spec[key]!r}")
    model = load_model(args.hf_config_path or args.model, args.revision, args.hf_overrides, args.hf_token)
    model = replace(model, name=args.model)
    tree = {key: spec[key] for key in ("tree_width", "tree_depth") if key in spec}
    run = Run(
        itemsize=ITEMSIZES[DTYPES[str(args.dtype)]],
        context=_tokens(args, "max_model_len") or default_context(model),
        chunk=_tokens(args, "max_num_batched_tokens") or chunk_for(Run(**tree).tree_rows),
        group_size=spec.get("substitute_group_size", Run.group_size),
        substitute_all=spec.get("substitute_layers") == "all",
        **tree,
    )
    plan = make_plan(model, run, vram, gpu and gpu.total)
    if fastest:  # a speculative config of the user's own is not changed
        plan = fastest_plan(plan, *links, any_substitutes=not spec)
    return plan


def flags(plan: Plan, given: set[str], gpu: Gpu | None) -> list[str]:
    """Options of `vllm serve` that realise the plan beside those given."""
    dtype = {2: "bfloat16" if gpu is None or gpu.bfloat16 else "float16", 4: "float32"}[plan.run.itemsize]
    found = plan.flags(dtype)
    if given & {"compilation_config", "optimization_level"}:  # both may hold what the plan would set
        found.pop("--cudagraph-capture-sizes", None)
        found.pop("--compilation-config", None)
    return [word for flag, values in found.items() for word in (flag, *values)]


def whole_gpu(args: Namespace, given: set[str], gpu: Gpu) -> int:
    """Bytes that an engine process may use where no size is given: all that is free, or the user's share of it."""
    free = gpu.total - gpu.others
    if "gpu_memory_utilization" not in given:
        return free
    return min(free, int(args.gpu_memory_utilization * gpu.total) + CUDA_CONTEXT + CUDA_GRAPHS)


def fits_with_defaults(plan: Plan, args: Namespace, gpu: Gpu) -> bool:
    """Whether plain vLLM starts by itself: with the model's whole context, many requests at a time, and compiled."""
    chunk, requests = (8192, 1024) if gpu.total >= LARGE_GPU else (2048, 256)
    run = replace(
        plan.run,
        context=_tokens(args, "max_model_len") or plan.model.max_positions,
        chunk=_tokens(args, "max_num_batched_tokens") or chunk,
    )
    logits = (args.max_num_seqs or requests) * plan.model.vocab_size * (run.itemsize + 2 * 4)
    memory = plain_memory(plan.model, run)
    compiling = memory.embedding + DEFAULT_GRAPHS
    return memory.total + logits + compiling <= min(plan.vram, DEFAULT_UTILIZATION * gpu.total)


def _tokens(args: Namespace, name: str) -> int | None:
    """A number of tokens; None if it is not given, or vLLM is to find it (-1)."""
    value = getattr(args, name)
    if value is None or (value == -1 and name == "max_model_len"):
        return None
    if value < 1:
        raise ValueError(f"--{name.replace('_', '-')} takes a whole number above zero, not {value}")
    return value
