"""`vllm-subspec serve --vram`: the plan's flags beside the user's own."""

from __future__ import annotations

import json

from ..sizes import parse_size
from . import SPECULATIVE_CONFIG
from .advise import Plan, chunk_for, default_context, make_plan
from .fastest import fastest_plan
from .gpu import this_gpu
from .memory import Run
from .model import load_model
from .options import options
from .report import ITEMSIZES
from .speed import bandwidths

DTYPES = {"auto": "bfloat16", "half": "float16", "float": "float32", **{name: name for name in ITEMSIZES}}


def plan_for(name: str, vram: str, rest: list[str], fastest: bool = False) -> tuple[Plan, list[str]]:
    """The plan under the user's own options, and the flags to add to them.

    An option that the user gave is kept and, where memory depends on it, planned with. Offloading is what is planned:
    its options are not to be given.

    Args:
        rest: the user's options of `vllm serve`
        fastest: the plan of `fastest_plan`, else that with the most resident layers

    Raises:
        FileNotFoundError, ValueError: see `report.run_plan`; and options that leave nothing to plan.
    """
    given = options(rest)
    spec = _speculative_config(given)
    for option in given:
        if option.startswith(("--offload-", "--cpu-offload-")):
            raise ValueError(f"--vram plans the offloading itself; remove {option}, or --vram")
    dtype = DTYPES.get(given.get("--dtype", "auto"))
    if dtype is None:
        raise ValueError(f"--vram plans for --dtype {', '.join(DTYPES)}, not {given['--dtype']!r}")
    size, model = parse_size(vram), load_model(name)
    tree = {key: spec[key] for key in ("tree_width", "tree_depth") if key in spec}
    run = Run(
        itemsize=ITEMSIZES[dtype],
        context=_number(given, "--max-model-len", default_context(model)),
        chunk=_number(given, "--max-num-batched-tokens", chunk_for(Run(**tree).tree_rows)),
        group_size=spec.get("substitute_group_size", Run.group_size),
        substitute_all=spec.get("substitute_layers") == "all",
        **tree,
    )
    gpu = this_gpu()
    plan = make_plan(model, run, size, gpu and gpu.total)
    if fastest:  # a speculative config of the user's own is not changed
        plan = fastest_plan(plan, *bandwidths(None, None), any_substitutes=not spec)
    if not plan.placement and spec:
        raise ValueError(f"{plan.summary()}; remove --speculative-config, or --vram")
    flags = plan.flags(dtype)
    if "--compilation-config" in given:  # may hold the capture sizes, and vLLM takes them from one place only
        flags.pop("--cudagraph-capture-sizes", None)
    return plan, [word for flag, values in flags.items() if flag not in given for word in (flag, *values)]


def _number(given: dict[str, str], option: str, default: int) -> int:
    text = given.get(option, str(default))
    if not text.isdigit() or int(text) == 0:
        raise ValueError(f"with --vram, {option} takes a whole number above zero, not {text!r}")
    return int(text)


def _speculative_config(given: dict[str, str]) -> dict:
    if "--speculative-config" not in given:
        return {}
    try:
        spec = {key.replace("-", "_"): value for key, value in json.loads(given["--speculative-config"]).items()}
    except (ValueError, AttributeError):
        raise ValueError(f"with --vram, --speculative-config takes JSON, as {SPECULATIVE_CONFIG}") from None
    if spec.get("method") != "subspec":
        raise ValueError("--vram plans for method subspec; remove it, or set the method to subspec")
    for key in ("tree_width", "tree_depth", "substitute_group_size"):
        if key in spec and not (isinstance(spec[key], int) and spec[key] > 0):
            raise ValueError(f"{key} takes a whole number above zero, not {spec[key]!r}")
    return spec
