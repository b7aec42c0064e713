"""One engine process: a job comes in as JSON on standard input, events go out as JSON lines on the file descriptor
that is the only argument. `process.py` is its other end.

    started   the engine is up: seconds, versions and device
    warm      a variant's warm-up is over
    answer    one request: what `vllm_subspec.tools.generate` measured, without the text
    profile   what `draft_pass.profile` found
    skipped   a prompt that does not fit the model's context
    done      the end: peak GPU memory
    failed    why the method cannot go on, in one sentence
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..sizes import GIB, capped
from .settings import NEED_DRAFT

ENGINE_DEFAULTS = {
    "max_num_seqs": 1,
    "max_model_len": 2048,
    # A second temperature or repeat would find its prompts in the cache, and time to first token would be another's.
    "enable_prefix_caching": False,
    "disable_log_stats": False,
}
WARM_UP_TOKENS = 16


def run_job(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a job, in order.

    Args:
        job: ``model``, ``speculative_config``, ``engine`` (arguments of LLM), ``vram`` (bytes or None), ``variants``
            (name, tree, draft: see `methods.Variant`), ``benchmarks`` (name, prompts), ``temperatures``,
            ``max_tokens``, ``seed``; or, with no variants, ``contexts``: see `draft_pass.profile`
    """
    from ..generate import start_engine

    started = time.perf_counter()
    arguments = {**ENGINE_DEFAULTS, **job["engine"]}
    if job["vram"] is not None:
        arguments["gpu_memory_utilization"] = limit_memory(job["vram"])
    method = (job["speculative_config"] or {}).get("method")
    with resident_draft() if method in NEED_DRAFT else nullcontext():
        llm = start_engine(job["model"], job["speculative_config"], **arguments)
    yield {"event": "started", "seconds": time.perf_counter() - started, **machine()}
    subspec = method == "subspec"
    if subspec:
        llm.collective_rpc("subspec_time_waits")
    for variant in job["variants"]:
        yield from _measure_variant(llm, job, variant, subspec)
    if job.get("contexts"):
        from .draft_pass import profile

        yield {"event": "profile", **profile(llm, job["contexts"])}
    yield {"event": "done", **peak_memory()}


def _measure_variant(llm, job: dict[str, Any], variant: dict[str, Any], subspec: bool) -> Iterator[dict[str, Any]]:
    from ..generate import generate
    from ..prompts import PROMPTS

    name, warm_up = variant["name"], WARM_UP_TOKENS
    if subspec:
        width, depth = variant["tree"]
        llm.collective_rpc("subspec_set_tree", args=(width, depth), kwargs=variant.get("draft"))
        warm_up = max(warm_up, 2 * depth)
    temperatures = job["temperatures"][: 1 if variant.get("first_only") else None]
    for temperature in temperatures:
        generate(llm, PROMPTS[0], min(warm_up, job["max_tokens"]), subspec, temperature=temperature, seed=job["seed"])
    yield {"event": "warm", "variant": name}
    for benchmark in job["benchmarks"]:
        for temperature in temperatures:
            for sample, turns in enumerate(benchmark["prompts"]):
                where = {"variant": name, "benchmark": benchmark["name"], "temperature": temperature, "sample": sample}
                yield from ({**event, **where} for event in _converse(llm, job, turns, temperature, subspec))


def _converse(
    llm, job: dict[str, Any], turns: list[str], temperature: float, subspec: bool
) -> Iterator[dict[str, Any]]:
    from ..generate import encode_chat, generate

    messages: list[dict[str, str]] = []
    for turn, user in enumerate(turns):
        messages.append({"role": "user", "content": user})
        if len(encode_chat(llm.get_tokenizer(), messages)) >= llm.model_config.max_model_len:
            yield from ({"event": "skipped", "turn": later} for later in range(turn, len(turns)))
            return
        before = spec_decode_counters(llm)
        answer = generate(llm, messages, job["max_tokens"], subspec, temperature=temperature, seed=job["seed"])
        counted = {key: value - before[key] for key, value in spec_decode_counters(llm).items() if value > before[key]}
        messages.append({"role": "assistant", "content": answer.text})
        told = {key: value for key, value in vars(answer).items() if key != "text"}
        yield {"event": "answer", "turn": turn, **told, "rounds": _columns(answer.rounds), "counters": counted}


def _columns(rounds: list[dict[str, Any]]) -> dict[str, list]:
    """Rounds as one list a figure; seconds to the microsecond."""
    keys = [key for key in rounds[0] if key != "request"] if rounds else []
    return {key: [None if r[key] is None else round(r[key], 6) for r in rounds] for key in keys}


def spec_decode_counters(llm) -> dict[str, float]:
    """vLLM's own counts of drafts and accepted tokens; ``accepted_per_pos:N`` is the token N places after the root."""
    counts: dict[str, float] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_num_")
        if name == metric.name:
            continue
        if hasattr(metric, "values"):
            counts.update({f"accepted_per_pos:{i}": value for i, value in enumerate(metric.values)})
        else:
            counts[name] = metric.value
    return counts


def resident_draft() -> AbstractContextManager[None]:
    """While an engine starts, let vLLM's prefetch offloader pass over a draft checkpoint's layers.

    vLLM 0.32 fails where a second model comes. Without this its own methods with a draft checkpoint could not be
    measured on a model that is offloaded this way.
    """
    from vllm.model_executor.offloader.prefetch import PrefetchOffloader

    from ...patching import replaced

    wrap = PrefetchOffloader.wrap_modules

    def wrap_first_model(self, modules_generator, prefix=""):
        return list(modules_generator) if self.module_offloaders else wrap(self, modules_generator, prefix)

    return replaced(PrefetchOffloader, "wrap_modules", wrap_first_model)


def limit_memory(vram: int) -> float:
    """Let this process use ``vram`` bytes of the GPU, CUDA's context and libraries included, as `plan` counts them.

    Returns:
        What vLLM may use of them, as a share of the GPU's memory: less the context, which it does not see, and graphs
        captured later.

    Raises:
        ValueError: the GPU has less.
    """
    import torch

    from ..plan.memory import CUDA_CONTEXT, CUDA_GRAPHS, LIBRARIES

    total = torch.cuda.get_device_properties(0).total_memory
    seen = capped(vram, total) - CUDA_CONTEXT
    torch.cuda.set_per_process_memory_fraction((seen - LIBRARIES) / total)
    return (seen - CUDA_GRAPHS) / total


def machine() -> dict[str, Any]:
    """Versions and device, for the report."""
    import platform

    import torch
    import transformers
    import vllm

    from ... import __version__

    cuda = torch.cuda.is_available()
    return {
        "versions": {
            "vllm-subspec": __version__, "vllm": vllm.__version__, "torch": torch.__version__,
            "transformers": transformers.__version__, "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores",
        "device_memory_gib": torch.cuda.get_device_properties(0).total_memory / GIB if cuda else None,
    }  # fmt: skip


def peak_memory() -> dict[str, float | None]:
    """GiB of GPU memory at their peak since the process started: in tensors, and held by torch's allocator."""
    import torch

    if not torch.cuda.is_available():
        return {"peak_allocated_gib": None, "peak_reserved_gib": None}
    return {
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def one_sentence(error: BaseException) -> str:
    """What went wrong, without the traceback and pydantic's frame around it."""
    text = str(error).strip() or type(error).__name__
    inner = re.search(r"Value error, (.*?)( \[type=|\n|$)", text)
    return inner[1] if inner else text.splitlines()[0]


def main(send: Callable[[dict[str, Any]], None]) -> None:
    """Run the job on standard input."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # memory and its limit are this process's
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    job = json.load(sys.stdin)
    try:
        for event in run_job(job):
            send(event)
    except Exception as error:
        send({"event": "failed", "error": one_sentence(error)})
        raise


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    with os.fdopen(descriptor, "w") as out:
        main(lambda event: print(json.dumps(event), file=out, flush=True))
