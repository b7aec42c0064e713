"""What vLLM loads: `register` in every process (``vllm.general_plugins``).

Two methods of vLLM's EngineArgs are wrapped, so that ``{"method": "subspec"}`` makes our speculative config, our
worker class is chosen for that engine, and what cannot work is refused at the start. Everything else of the plugin is
reached through that worker class. Without the method both wrappers call vLLM's own and change nothing.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from .compat import SUPPORTED, check_manifest, is_supported, vllm_build

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.subspec")


def register() -> None:
    """Hook vLLM's EngineArgs, once, on a supported vLLM; elsewhere say so and leave vLLM untouched."""
    _, installed = vllm_build()
    if not is_supported(installed):
        logger.warning("subspec: this plugin needs vLLM %s.x and is off on vLLM %s", SUPPORTED, installed)
        return
    from vllm.engine.arg_utils import EngineArgs

    _wrap(EngineArgs, "create_speculative_config", _create_speculative_config)
    _wrap(EngineArgs, "create_engine_config", _create_engine_config)


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
    from . import cpu

    if _method(args) != "subspec":
        cpu.disarm()
        return original(args, target_model_config, target_parallel_config)
    from .config import make_config
    from .support import check_environment

    given = dict(args.speculative_config or {})
    given.update(num_speculative_tokens=args.spec_tokens) if args.spec_tokens is not None else None
    given.update(model=args.spec_model) if args.spec_model is not None else None
    made = make_config(given, target_model_config, target_parallel_config)
    check_manifest()
    check_environment()
    cpu.arm()
    worker = "worker_cpu.SubSpecCPUWorker" if cpu.is_cpu_build() else "worker.SubSpecWorker"
    if target_parallel_config.worker_cls != "auto":
        raise ValueError("subspec: --worker-cls cannot be combined with method subspec, which brings its own; remove it")
    target_parallel_config.worker_cls = f"vllm_subspec.{worker}"
    return made


def _create_engine_config(original, args: EngineArgs, *call_args, **call_kwargs):
    if _method(args) != "subspec":
        return original(args, *call_args, **call_kwargs)
    from . import cpu
    from .support import check_config

    try:
        with cpu.configuring():
            made = original(args, *call_args, **call_kwargs)
            check_config(made)
    except Exception:
        cpu.disarm()
        raise
    return made
