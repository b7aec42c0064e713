"""What vLLM loads: `register` in every process (``vllm.general_plugins``).

Three methods of vLLM's EngineArgs are wrapped, so that ``{"method": "subspec"}`` makes our speculative config, our
worker and scheduler classes are chosen for that engine, a step has room for a tree, and what cannot work is refused at
the start; the check by which vLLM refuses requests that its own speculative methods cannot serve; and two places that
take a tree's nodes for drafts in a row. Once such an engine is configured, so is the start of vLLM's front end, for its
output processor (see `delivery`). Everything else of the plugin is reached through the worker and scheduler classes.
Without the method the wrappers call vLLM's own and change nothing.
"""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..patching import replaced
from ..versions import SUPPORTED, is_supported, vllm_build
from .compat import announce_variable, check_manifest

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

    from .config import SubSpecConfig

logger = logging.getLogger("vllm.subspec")

WORKERS = {
    (True, False): "engine.worker.SubSpecWorker",
    (True, True): "engine.worker_cpu.SubSpecCPUWorker",
    (False, False): "tools.bench.ablation.AblationWorker",
    (False, True): "tools.bench.ablation_cpu.AblationCPUWorker",
}
"""Worker class by: the whole method (not an ablation's part of it), a CPU build"""


def register() -> None:
    """Set the hooks, once, on a supported vLLM; elsewhere say so and leave vLLM untouched."""
    _, installed = vllm_build()
    if not is_supported(installed):
        logger.warning("subspec: this plugin needs vLLM %s.x and is off on vLLM %s", SUPPORTED, installed)
        return
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.spec_decode.metrics import SpecDecodingProm

    _wrap(SamplingParams, "_validate_spec_decode", _validate_spec_decode)
    _wrap(EngineArgs, "create_speculative_config", _create_speculative_config)
    _wrap(EngineArgs, "_set_default_max_num_seqs_and_batched_tokens_args", _set_default_batch)
    _wrap(EngineArgs, "create_engine_config", _create_engine_config)
    _wrap(VllmConfig, "_set_max_num_scheduled_tokens", _set_max_num_scheduled_tokens)
    _wrap(SpecDecodingProm, "__init__", _spec_decoding_prom)


def _wrap(cls: type, name: str, wrapper: Any) -> None:
    original = getattr(cls, name)
    if getattr(original, "_subspec", False):
        return

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        return wrapper(original, self, *args, **kwargs)

    method._subspec = True
    setattr(cls, name, method)


def _method(args: EngineArgs) -> str | None:
    return args.spec_method or (args.speculative_config or {}).get("method")


def _create_speculative_config(original, args: EngineArgs, target_model_config, target_parallel_config):
    from ..cpu import platform as cpu

    if _method(args) != "subspec":
        cpu.disarm()
        return _of_vllms_own_method(original, args, target_model_config, target_parallel_config)
    from .support import check_model

    check_manifest()
    check_model(target_model_config)
    made = _speculative_config(args, target_model_config, target_parallel_config)
    cpu.arm()
    worker = WORKERS[made.share_kv and made.async_transfer, cpu.is_cpu_build()]
    target_parallel_config.worker_cls = f"vllm_subspec.{worker}"
    return made


def _of_vllms_own_method(original, *call_args):
    """What vLLM answers. Its error about a method that does not exist, perhaps ours mistyped, names ours too."""
    from pydantic import ValidationError

    try:
        return original(*call_args)
    except ValidationError as error:
        from .config import is_about_method, with_subspec

        if any(map(is_about_method, error.errors())):
            raise with_subspec(error) from None
        raise


def _speculative_config(args: EngineArgs, target_model_config, target_parallel_config) -> SubSpecConfig:
    """The one that the arguments ask for."""
    from .config import make_config

    given = {key.replace("-", "_"): value for key, value in (args.speculative_config or {}).items()}
    for flag, key, value in (
        ("--spec-method", "method", args.spec_method),
        ("--spec-model", "model", args.spec_model),
        ("--spec-tokens", "num_speculative_tokens", args.spec_tokens),
    ):
        if value is None:
            continue
        if key in given:
            raise ValueError(f"subspec: {flag} is given beside {key} in --speculative-config; remove one of them")
        given[key] = value
    return make_config(given, target_model_config, target_parallel_config)


def _set_default_batch(original, args: EngineArgs, usage_context, model_config, parallel_config):
    """Where the user leaves it to vLLM how many tokens a step has, they are at least the rows of a tree."""
    derived = args.max_num_batched_tokens is None
    original(args, usage_context, model_config, parallel_config)
    if not derived or _method(args) != "subspec":
        return
    rows = 1 + _speculative_config(args, model_config, parallel_config).num_speculative_tokens
    if args.max_num_batched_tokens < rows:
        logger.info("subspec: max_num_batched_tokens is raised to %d, the rows of a tree", rows)
        args.max_num_batched_tokens = rows


def _create_engine_config(original, args: EngineArgs, *call_args, **call_kwargs):
    if _method(args) != "subspec":
        return original(args, *call_args, **call_kwargs)
    from vllm.engine import arg_utils

    from ..cpu import platform as cpu
    from .scheduler import SubSpecSchedulerConfig
    from .support import (
        check_arguments,
        check_config,
        without_async_scheduling,
        without_compilation,
        without_full_graphs,
    )

    announce_variable()
    try:
        check_arguments(args)
        without_async_scheduling(args)
        without_compilation(args)
        with cpu.configuring(), replaced(arg_utils, "SchedulerConfig", SubSpecSchedulerConfig):
            made = original(args, *call_args, **call_kwargs)
            check_config(made)
            without_full_graphs(made)
    except Exception:
        cpu.disarm()
        raise
    from vllm.v1.engine.async_llm import AsyncLLM  # imported late: most processes that load plugins need none of it

    _wrap(AsyncLLM, "__init__", _start_async_llm)
    return made


def _start_async_llm(original, llm, vllm_config, *args, **kwargs):
    if getattr(vllm_config.speculative_config, "method", None) != "subspec":
        return original(llm, vllm_config, *args, **kwargs)
    from vllm.v1.engine import async_llm

    from .delivery import TokenByToken

    with replaced(async_llm, "OutputProcessor", TokenByToken):
        return original(llm, vllm_config, *args, **kwargs)


def _validate_spec_decode(original, params, speculative_config):
    # vLLM's own methods cannot serve min_p and logit_bias; here vLLM's sampler has the last word on every token.
    if getattr(speculative_config, "method", None) != "subspec":
        original(params, speculative_config)


def _set_max_num_scheduled_tokens(original, config):
    # vLLM takes a budget below 8192 for one that drafts made small, and advises to draft less. Ours is as it was given:
    # a tree's rows are scheduled tokens, and check_config sees that they fit.
    scheduler = config.scheduler_config
    if getattr(config.speculative_config, "method", None) != "subspec":
        original(config)
    elif scheduler.max_num_scheduled_tokens is None:
        scheduler.max_num_scheduled_tokens = scheduler.max_num_batched_tokens


def _spec_decoding_prom(original, prom, speculative_config, *args, **kwargs):
    # A counter for each level, as our scheduler counts, not for each node.
    if getattr(speculative_config, "method", None) == "subspec":
        speculative_config = SimpleNamespace(num_speculative_tokens=speculative_config.tree_depth)
    original(prom, speculative_config, *args, **kwargs)
