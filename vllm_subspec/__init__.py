"""vllm-subspec: fast, lossless decoding of offloaded models in stock vLLM (SubSpec, arXiv 2509.18344)."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vllm-subspec")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0.0.0"
