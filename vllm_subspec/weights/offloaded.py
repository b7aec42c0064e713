"""Which parameters the engine keeps in CPU memory, asked of vLLM's live offloader."""

from __future__ import annotations

import torch
from vllm.model_executor.offloader import get_offloader
from vllm.model_executor.offloader.prefetch import PrefetchOffloader
from vllm.model_executor.offloader.uva import UVAOffloader


def read_in_place(parameter: torch.Tensor) -> bool:
    """Whether the GPU reads this parameter from CPU memory where it lies (``uva``)."""
    return getattr(parameter, "_vllm_is_uva_offloaded", False)


def offloaded_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name and full value of every offloaded parameter of ``model``, wherever the value lies now.

    With vLLM's ``prefetch`` backend a parameter's own data is a rotating GPU buffer, so the value is the offloader's
    CPU copy; with ``uva`` it is the parameter, a view of CPU memory. Empty without offloading.
    """
    offloader = get_offloader()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if isinstance(offloader, PrefetchOffloader):
        stored = [p for m in offloader.module_offloaders for p in m._param_offloaders.values()]
        return {names[id(p._param)]: p._cpu_storage for p in stored if id(p._param) in names}
    if isinstance(offloader, UVAOffloader):
        return {
            name: p.data
            for name, p in model.named_parameters()
            if read_in_place(p) or (offloader.cpu_offload_bytes and p.device.type == "cpu")
        }
    return {}
