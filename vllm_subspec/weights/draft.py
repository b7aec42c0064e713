"""The draft model: the target's own modules around the substitutes (step 2 of the algorithm)."""

from __future__ import annotations

import copy
import re
from types import MethodType

import torch
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from .offloaded import offloaded_parameters


def decoder_linears(model: torch.nn.Module) -> dict[str, LinearBase]:
    """The linears of all decoder layers, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LinearBase) and re.search(r"\.\d+\.", name)}


def linears_to_substitute(model: torch.nn.Module, which: str) -> dict[str, LinearBase]:
    """The linears of ``model`` that get a substitute, by name.

    Args:
        which: "offloaded", "all" (of every decoder layer) or "auto" (offloaded if any is, else all)

    Raises:
        NotImplementedError: one of them is not a plain weight.
        ValueError: "offloaded", and the engine offloads no linear.
    """
    linears = {name: m for name, m in model.named_modules() if isinstance(m, LinearBase)}
    offloaded = {name.removesuffix(".weight") for name in offloaded_parameters(model)} & set(linears)
    if which == "offloaded" and not offloaded:
        raise ValueError(
            "subspec: substitute_layers is 'offloaded' but the engine offloads no linear layer; "
            "add --offload-group-size or --cpu-offload-gb, or set substitute_layers to 'all'"
        )
    if which == "all" or (which == "auto" and not offloaded):
        chosen = decoder_linears(model)
    else:
        chosen = {name: m for name, m in linears.items() if name in offloaded}
    for name, linear in chosen.items():
        if not isinstance(linear.quant_method, UnquantizedLinearMethod):
            raise NotImplementedError(f"subspec: {name} is not an unquantized linear layer")
    return chosen


def shallow_copy(module: torch.nn.Module) -> torch.nn.Module:
    """A module of the same class with the same tensors and children, whose tables can be changed on their own.

    A forward on the instance (vLLM's Transformers backend sets fused ones) is bound to the copy. An offloader's, a
    plain function, stays behind: the draft neither waits for nor starts a transfer.
    """
    copied = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules"):
        copied.__dict__[table] = dict(getattr(module, table))
    forward = copied.__dict__.pop("forward", None)
    if isinstance(forward, MethodType):
        copied.__dict__["forward"] = MethodType(forward.__func__, copied)
    return copied


def make_draft(model: torch.nn.Module, substitutes: dict[str, LinearBase], device: torch.device) -> torch.nn.Module:
    """The target's structure with some linears replaced and everything else the same object.

    Only modules on the way to something that differs are copied, and only their tables: tensors are shared.
    Offloaded parameters that are no linear weight (norms, biases: a few KB a layer) get a resident copy.

    Args:
        model: the target, loaded
        substitutes: the linears to put in place, by name
        device: where the resident copies go
    """
    resident = {
        name: torch.nn.Parameter(value.to(device, copy=True), requires_grad=False)  # uva's are views of CPU memory
        for name, value in offloaded_parameters(model).items()
        if name.removesuffix(".weight") not in substitutes
    }

    def build(module: torch.nn.Module, prefix: str) -> torch.nn.Module:
        own = {name: resident[prefix + name] for name in module._parameters if prefix + name in resident}
        if (substitute := substitutes.get(prefix.removesuffix("."))) is not None:
            substitute._parameters.update(own)
            return substitute
        children = {
            name: build(child, f"{prefix}{name}.") for name, child in module._modules.items() if child is not None
        }
        same_children = all(child is module._modules[name] for name, child in children.items())
        # The compiled target leaves these to its compiler; the draft runs as it is and takes vLLM's fused kernel.
        fused = isinstance(module, CustomOp) and device.type == "cuda"
        if same_children and not own and not fused and "forward" not in module.__dict__:
            return module
        copied = shallow_copy(module)
        copied._modules.update(children)
        copied._parameters.update(own)
        copied.do_not_compile = True  # never the target's compiled graph
        if fused:
            copied._forward_method = copied.forward_cuda
        return copied

    return build(model, "")
