"""The command `vllm-subspec plan`: its input, its table and its JSON."""

from __future__ import annotations

import json
import shlex

from ..sizes import GIB, MIB, gib, parse_size
from .advise import Plan, default_context, make_plan
from .fastest import fastest_plan
from .gpu import Gpu, this_gpu
from .host import EXACT, WSL_LIMIT, Host, Need, can_be_exact, needed, obstacles, this_host, will_be_exact
from .memory import Run
from .model import load_model
from .speed import GB, PROMPT, Bandwidth, Expectation, bandwidths, expect

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
TAUS = [8.0, 13.0, 20.0, 28.0]
"""SmolLM2-135M's acceptance length is 8 to 15 by prompt, that of 7B and larger models 20 to 28 (paper, table 1)"""
WORTH_SAYING = 1.03
"""How many times faster `fastest_plan` must be for the plan to mention it"""
ITEMS = {
    "embedding": "embedding",
    "head": "head",
    "other_weights": "final norm, rotary tables",
    "resident_layers": "resident layers",
    "substitutes": "4-bit substitutes",
    "prefetch_buffers": "prefetch buffers",
    "kv_cache": "KV cache",
    "activations": "activations, logits",
    "tree": "tree",
    "libraries": "libraries, kernels",
    "cuda_graphs": "CUDA graph of the draft",
    "cuda_context": "CUDA context",
    "loading": "making substitutes, above the rest",
}


def run_plan(
    name: str,
    vram: str,
    context: int | None = None,
    dtype: str = "bfloat16",
    pcie: float | None = None,
    bandwidth: float | None = None,
    taus: list[float] = TAUS,
    as_json: bool = False,
    fastest: bool = False,
) -> int:
    """Print the plan.

    Args:
        context: tokens; 4096, or fewer if the model has fewer positions
        pcie, bandwidth: GB/s from CPU memory, and of GPU memory; measured or assumed if None
        fastest: the plan of `fastest_plan`, else that with the most resident layers

    Raises:
        FileNotFoundError, ValueError: see `load_model`, `parse_size`, `make_plan`; and numbers out of range.
    """
    for option, value in (("--context", context), ("--pcie", pcie), ("--bandwidth", bandwidth)):
        if value is not None and not value > 0:
            raise ValueError(f"{option} takes a number above zero, not {value}")
    for tau in taus:
        if not 1 <= tau <= Run.tree_depth + 1:
            raise ValueError(f"--tau is the tokens of a pass, 1 to {Run.tree_depth + 1}, not {tau:g}")
    size, model = parse_size(vram), load_model(name)
    run = Run(itemsize=ITEMSIZES[dtype], context=context or default_context(model))
    gpu = this_gpu()
    plan, links = make_plan(model, run, size, gpu and gpu.total), bandwidths(pcie, bandwidth)
    if fastest:
        plan = fastest_plan(plan, *links)
    expected = expect(plan, *links, taus)
    if as_json:
        print(json.dumps(as_dict(plan, dtype, *links, expected), indent=1))
    else:
        print_plan(plan, dtype, gpu, *links, expected)
        if plan.placement and not fastest:
            print_hint(plan, *links, expected)
    return 0


def print_hint(plan: Plan, pcie: Bandwidth, gpu: Bandwidth, expected: Expectation) -> None:
    """Say what --fastest would gain, if it is `WORTH_SAYING`."""
    faster = fastest_plan(plan, pcie, gpu)
    gain = expected.t_round / expect(faster, pcie, gpu, []).t_round
    if gain > WORTH_SAYING:
        print(f"By the formula and with the same tau, {gain:.2f} times as fast with --fastest: {faster.summary()}.")


def command(plan: Plan, dtype: str) -> str:
    """The plan as a command to paste."""
    words = [word for flag, values in plan.flags(dtype).items() for word in (flag, *values)]
    return shlex.join(["vllm", "serve", plan.model.name, *words])


def as_dict(plan: Plan, dtype: str, pcie: Bandwidth, gpu: Bandwidth, expected: Expectation) -> dict:
    """The plan for JSON: sizes in bytes, times in seconds, bandwidths in bytes a second."""
    return {
        "model": plan.model.name,
        "parameters": plan.model.parameters,
        "vram": plan.vram,
        "gpu_total": plan.gpu_total,
        "gpu_is_assumed": plan.gpu_is_assumed,
        "run": vars(plan.run),
        "layers": len(plan.model.layers),
        "offloaded_layers": list(plan.offloaded),
        "offloaded_bytes": plan.offloaded_bytes,
        "substitutes_without_kernel": plan.without_kernel,
        "cpu_memory": {**vars(needed(plan, will_be_exact())), "available": this_host().available},
        "memory": {**vars(plan.memory), "total": plan.memory.total},
        "flags": plan.flags(dtype),
        "command": command(plan, dtype),
        "pcie": vars(pcie),
        "gpu_memory": vars(gpu),
        "t_target": expected.t_target,
        "t_draft": expected.t_draft,
        "t_verify": expected.t_verify,
        "t_first": expected.t_first,
        "expected": [{"tau": t, "tokens_per_second": s, "speedup": x} for t, (s, x) in expected.by_tau.items()],
    }


def print_plan(
    plan: Plan, dtype: str, device: Gpu | None, pcie: Bandwidth, gpu: Bandwidth, expected: Expectation
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=100, highlight=False, soft_wrap=True)
    table = Table(title=f"{plan.model.name}, {dtype}, context {plan.run.context}")
    table.add_column("on the GPU")
    table.add_column("GiB", justify="right")
    for item, title in ITEMS.items():
        if size := getattr(plan.memory, item):
            table.add_row(title, f"{size / GIB:.2f}")
    table.add_section()
    table.add_row("in all", f"{plan.memory.total / GIB:.2f}")
    table.add_row("asked for", f"{plan.vram / GIB:.2f}")
    console.print(table)
    console.print(plan.summary() + ".")
    if plan.without_kernel:
        console.print(f"{capitalized(plan.without_kernel)}.", markup=False)
    if plan.gpu_is_assumed:
        console.print(f"No GPU here: --gpu-memory-utilization assumes that {gib(plan.vram)} is the whole GPU.")
    else:
        console.print(f"--gpu-memory-utilization is of this GPU's {gib(plan.gpu_total)}.")
        if plan.vram + device.others > plan.gpu_total + MIB:
            console.print(
                f"Other processes hold {gib(device.others)} of it now: it would not start beside them. "
                f"End them, or plan for --vram {(plan.gpu_total - device.others) // MIB}MiB."
            )
    console.print(f"\n{command(plan, dtype)}\n", markup=False)

    rate = lambda b: f"{b.bytes_per_second / GB:.0f} GB/s ({b.source})"  # noqa: E731
    if not plan.placement:
        console.print(f"A pass takes at least {1e3 * expected.t_target:.1f} ms: GPU memory at {rate(gpu)}.")
        return
    for line in host_lines(plan, this_host()):
        console.print(line, markup=False)
    console.print(
        f"{gib(plan.offloaded_bytes)} of pinned CPU memory stream every pass. "
        f"PCIe {rate(pcie)}, GPU memory {rate(gpu)}."
    )
    console.print(
        f"Expected: t_target {1e3 * expected.t_target:.0f} ms, t_draft {1e3 * expected.t_draft:.1f} ms, "
        f"verification {1e3 * expected.t_verify:.0f} ms; {first_token(expected)}."
    )
    speeds = Table()
    speeds.add_column("tau")
    speeds.add_column("tokens/s")
    speeds.add_column("speedup")
    for tau, (speed, speedup) in expected.by_tau.items():
        speeds.add_row(f"{tau:g}", f"{speed:.1f}", f"{speedup:.1f}x")
    console.print(speeds)


def host_lines(plan: Plan, host: Host) -> list[str]:
    """CPU memory of a plan, and what stands against it."""
    need = needed(plan, will_be_exact())
    lines = [cpu_memory(need, host) + "."]
    if can_be_exact():
        rounded = gib(needed(plan, exact=False).serving)
        lines.append(
            f"`vllm serve` takes {rounded} unless PYTORCH_ALLOC_CONF is {EXACT}, as `vllm-subspec serve` sets it."
        )
    lines += [f"It would not start: {obstacle}." for obstacle in obstacles(need, host)]
    return [*lines, WSL_LIMIT] if host.wsl else lines


def cpu_memory(need: Need, host: Host) -> str:
    """A sentence without its full stop."""
    there = "" if host.available is None else f", of {gib(host.available)} available"
    return f"CPU memory: {gib(need.serving)}, and {gib(need.loading)} while it loads{there}"


def first_token(expected: Expectation) -> str:
    """In a part of a sentence."""
    return f"{expected.t_first:.1f} s to the first token of a prompt of {PROMPT:,}"


def capitalized(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
