"""A vLLM linear with a 4-bit substitute for its weight."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch.nn.functional import linear as dense_product
from torch.nn.functional import pad
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.marlin import MarlinLinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import pack_quantized_values_into_int32
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from vllm.scalar_type import scalar_types

from .draft import linears_to_substitute, shallow_copy
from .quantize import QuantizedWeight, quantize, slices
from .storage import KernelShape, kernel_shape

logger = init_logger("vllm.subspec.substitute")

KERNELS: dict[str, type[MPLinearKernel]] = {"cuda": MarlinLinearKernel, "cpu": CPUWNA16LinearKernel}
"""vLLM's 4-bit products that take integer zero-points and multiply by exactly the quantized values."""


def make_substitutes(model: torch.nn.Module, spec, device: torch.device) -> dict[str, LinearBase]:
    """The substitutes that the speculative config asks for, by the name of the linear that they stand in for.

    One weight at a time goes to ``device``, is quantized and packed there, so that never more than one lies there
    unpacked. To be called when the weights are loaded and before vLLM repacks them.

    Args:
        spec: the SubSpecConfig

    Raises:
        ValueError: they do not fit in the device's memory.
    """
    substitutes: dict[str, LinearBase] = {}
    without_kernel: dict[str, list[str]] = {}
    chosen = linears_to_substitute(model, spec.substitute_layers)
    try:
        for name, linear in chosen.items():
            shape, obstacle = _kernel_shape(linear.weight, spec.substitute_group_size, device)
            if obstacle is not None:
                without_kernel.setdefault(obstacle, []).append(name)
            group_size = spec.substitute_group_size if shape is None else shape.group_size
            quantized = quantize(linear.weight.data.to(device), spec.substitute_bits, group_size)
            substitutes[name] = substitute_linear(linear, quantized, shape)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"subspec: no GPU memory is left for the 4-bit substitutes after {len(substitutes)} of {len(chosen)}; "
            "offload more layers (`vllm-subspec plan` says how many fit), or leave the method out"
        ) from error
    _report(without_kernel, chosen)
    return substitutes


def _report(without_kernel: dict[str, list[str]], chosen: dict[str, LinearBase]) -> None:
    """Say which linears no 4-bit kernel multiplies by, by obstacle, the same linear of all layers once."""
    for obstacle, names in without_kernel.items():
        kinds = {re.sub(r"\.\d+\.", ".*.", name): list(chosen[name].weight.shape) for name in names}
        where = ", ".join(f"{kind} {shape}" for kind, shape in kinds.items())
        logger.warning(
            "subspec: %d of %d substitutes are dequantized each time they are used, which is slow: %s: %s",
            len(names), len(chosen), where, obstacle,
        )  # fmt: skip


def _kernel_shape(weight: torch.Tensor, group_size: int, device: torch.device) -> tuple[KernelShape | None, str | None]:
    """The shape in which the device's 4-bit kernel takes that weight, or why it takes none.

    Neither in float32, in which no product keeps the quantized values: such substitutes are dense, and exact.
    """
    kernel_cls = KERNELS.get(device.type)
    if weight.dtype == torch.float32:
        return None, None
    if kernel_cls is None:
        return None, f"vLLM has no 4-bit product on {device.type}"
    shape = kernel_shape(*weight.shape, group_size, device.type)
    if shape is None:
        return None, f"in groups of {group_size}, vLLM's {kernel_cls.__name__} takes them only with many zeros added"
    fits, why = kernel_cls.can_implement(_kernel_config(shape, weight.dtype))
    return (shape, None) if fits else (None, why)


def substitute_linear(linear: LinearBase, quantized: QuantizedWeight, shape: KernelShape | None) -> LinearBase:
    """``linear`` with another weight: its bias, sizes and options are shared, its own weight is left alone.

    Args:
        shape: in which a kernel takes it, None without one
    """
    substitute = shallow_copy(linear)
    substitute._parameters.pop("weight")
    if quantized.scales.dtype == torch.float32:
        logger.info_once("Substitutes run as dense weights: no 4-bit product in float32 keeps the quantized values")
        _use_dequantized(substitute, quantized)
    else:
        substitute.quant_method = method(quantized, shape)
    return substitute


def substitute_bytes(substitute: LinearBase) -> int:
    """Memory that a substitute takes besides what it shares."""
    made = substitute.quant_method
    tensors = made.tensors() if isinstance(made, KernelMethod | DequantizingMethod) else [substitute.weight]
    return sum(tensor.nbytes for tensor in tensors)


def method(quantized: QuantizedWeight, shape: KernelShape | None) -> LinearMethodBase:
    """The product with a weight in half precision, by the device's kernel if it has a ``shape``."""
    if shape is None:
        return DequantizingMethod(quantized)
    kernel_cls = KERNELS[quantized.scales.device.type]
    logger.info_once("Substitutes run on vLLM's %s", kernel_cls.__name__)
    return KernelMethod(kernel_cls, shape, quantized)


def _kernel_config(shape: KernelShape, dtype: torch.dtype) -> MPLinearLayerConfig:
    return MPLinearLayerConfig(
        full_weight_shape=(shape.inputs, shape.outputs),
        partition_weight_shape=(shape.inputs, shape.outputs),
        weight_type=scalar_types.uint4,
        act_type=dtype,
        group_size=shape.group_size,
        zero_points=True,
    )


class KernelMethod(LinearMethodBase):
    """A vLLM 4-bit kernel around one quantized weight."""

    def __init__(self, kernel_cls: type[MPLinearKernel], shape: KernelShape, quantized: QuantizedWeight):
        self.outputs, inputs = quantized.codes.shape
        self.zeros = shape.inputs - inputs  # that every row of activations needs at its end
        self.weights = _packed(quantized, shape)
        config = _kernel_config(shape, quantized.scales.dtype)
        self.kernel = kernel_cls(config, "weight_packed", "weight_scale", "weight_zero_point")
        self.kernel.process_weights_after_loading(self.weights)

    def create_weights(self, *args, **kwargs):
        raise NotImplementedError("made from a QuantizedWeight")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = pad(x, (0, self.zeros)) if self.zeros else x
        out = self.kernel.apply_weights(self.weights, x)[..., : self.outputs]
        # The bias is the target's own tensor, and kernels permute or convert theirs: it is added outside.
        return out.contiguous() if bias is None else out + bias.to(out.dtype)

    def tensors(self) -> list[torch.Tensor]:
        return list(self.weights.parameters())


def _packed(quantized: QuantizedWeight, shape: KernelShape) -> torch.nn.Module:
    """The weight in the layout of compressed-tensors, from which every vLLM kernel repacks into its own.

    Codes, scales and zero-points that are added are zero.
    """
    layout = {"input_dim": 1, "output_dim": 0, "weight_loader": None}
    pack = lambda t, dim: pack_quantized_values_into_int32(t.int(), scalar_types.uint4, dim)  # noqa: E731
    codes, groups = quantized.codes, quantized.scales.shape[1]
    packed = torch.zeros(shape.outputs, shape.inputs // 8, dtype=torch.int32, device=codes.device)
    for rows in slices(codes):  # four bytes a code while it is packed
        packed[rows] = pack(pad(codes[rows], (0, shape.inputs - codes.shape[1])), 1)
    added = (0, shape.inputs // shape.group_size - groups, 0, shape.outputs - codes.shape[0])
    packing = {"packed_factor": 8, **layout}
    weights = torch.nn.Module()
    weights.bias = None
    weights.weight_packed = PackedvLLMParameter(data=packed, packed_dim=1, **packing)
    weights.weight_scale = GroupQuantScaleParameter(data=pad(quantized.scales, added), **layout)
    weights.weight_zero_point = PackedvLLMParameter(data=pack(pad(quantized.zeros, added), 0), packed_dim=0, **packing)
    return weights


class DequantizingMethod(LinearMethodBase):
    """A quantized weight of any shape that becomes a dense one, as large as the target's, each time it is used."""

    def __init__(self, quantized: QuantizedWeight):
        self.inputs = quantized.codes.shape[1]
        codes = pad(quantized.codes, (0, self.inputs % 2))
        self.packed = replace(quantized, codes=codes[:, ::2] | codes[:, 1::2] << 4)  # two a byte

    def create_weights(self, *args, **kwargs):
        raise NotImplementedError("made from a QuantizedWeight")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        pairs = self.packed.codes
        codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)[:, : self.inputs]
        return dense_product(x, replace(self.packed, codes=codes).dequantize(), bias)

    def tensors(self) -> list[torch.Tensor]:
        return [self.packed.codes, self.packed.scales, self.packed.zeros]


def _use_dequantized(linear: LinearBase, quantized: QuantizedWeight) -> None:
    """The quantized values as a dense weight, on vLLM's kernel for such. Exact; saves no memory."""
    linear._parameters["weight"] = torch.nn.Parameter(quantized.dequantize(), requires_grad=False)
    linear.quant_method = UnquantizedLinearMethod()
    linear.quant_method.process_weights_after_loading(linear)
