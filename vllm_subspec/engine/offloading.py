"""What an engine gains from, said once at the start: how much of the model is offloaded, and what stands in for it."""

from __future__ import annotations

import torch
from vllm.config import OffloadConfig, VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase

from ..round.limits import LEAVE_OUT
from ..weights.draft import decoder_linears
from ..weights.offloaded import offloaded_parameters
from ..weights.substitute import substitute_bytes

logger = init_logger("vllm.subspec")

GIB = 2**30


def report_offloading(
    model: torch.nn.Module, substitutes: dict[str, LinearBase], vllm_config: VllmConfig, seconds: float
) -> None:
    """Log what is offloaded; a warning with the remedy where that is nothing, and so nothing is gained.

    To be called when the weights are loaded and before vLLM repacks them.

    Args:
        substitutes: by name of the linear that each stands in for
        seconds: that it took to make them
    """
    linears = decoder_linears(model)
    values = offloaded_parameters(model)
    offloaded = {name: values[f"{name}.weight"].nbytes for name in linears if f"{name}.weight" in values}
    resident = sum(linear.weight.nbytes for name, linear in linears.items() if name not in offloaded)
    if offloaded:
        streamed, stand_in = sum(offloaded.values()), sum(map(substitute_bytes, substitutes.values()))
        logger.info(
            "subspec: %d of %d decoder linears (%.2f of %.2f GiB) are offloaded; %d have 4-bit substitutes (%.2f GiB, "
            "made in %.1f s)",
            len(offloaded), len(linears), streamed / GIB, (streamed + resident) / GIB,
            len(substitutes), stand_in / GIB, seconds,
        )  # fmt: skip
    elif vllm_config.device_config.device_type == "cpu":
        logger.info(
            "subspec: on a CPU nothing is offloaded, so this engine shows how the method works and not what it gains; "
            "%d decoder linears have substitutes (made in %.1f s)",
            len(substitutes), seconds,
        )  # fmt: skip
    else:
        logger.warning(
            "subspec: none of the %d decoder linears (%.2f GiB) is offloaded, so this engine is likely slower than plain "
            "vLLM; %s",
            len(linears), resident / GIB, _remedy(model, vllm_config.offload_config),
        )  # fmt: skip


def _remedy(model: torch.nn.Module, offload: OffloadConfig) -> str:
    if offload.prefetch.offload_group_size or offload.uva.cpu_offload_gb:
        return f"vLLM's offloading flags take nothing of {type(model).__name__}, {LEAVE_OUT}"
    return f"{LEAVE_OUT}, or offload what the GPU has no room for, as by --offload-group-size 1"
