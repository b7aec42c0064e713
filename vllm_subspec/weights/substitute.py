"""A vLLM linear with a 4-bit substitute for its weight."""

from __future__ import annotations

import torch
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.marlin import MarlinLinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import pack_quantized_values_into_int32
from vllm.model_executor.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from vllm.scalar_type import scalar_types

from .draft import linears_to_substitute, shallow_copy
from .quantize import QuantizedWeight, fitting_group_size, quantize, slices

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
    chosen = linears_to_substitute(model, spec.substitute_layers)
    try:
        for name, linear in chosen.items():
            group_size = fitting_group_size(spec.substitute_group_size, linear.weight.shape[1])
            quantized = quantize(linear.weight.data.to(device), spec.substitute_bits, group_size)
            substitutes[name] = substitute_linear(linear, quantized)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"subspec: no GPU memory is left for the 4-bit substitutes after {len(substitutes)} of {len(chosen)}; "
            "offload more layers (`vllm-subspec plan` says how many fit), or leave the method out"
        ) from error
    return substitutes


def substitute_linear(linear: LinearBase, quantized: QuantizedWeight) -> LinearBase:
    """``linear`` with another weight: its bias, sizes and options are shared, its own weight is left alone."""
    substitute = shallow_copy(linear)
    substitute._parameters.pop("weight")
    config = _kernel_config(quantized)
    kernel_cls = KERNELS.get(quantized.scales.device.type)
    obstacle = _obstacle(kernel_cls, config)
    if obstacle is None:
        logger.info_once("Substitutes run on vLLM's %s", kernel_cls.__name__)
        substitute.quant_method = KernelMethod(kernel_cls, config, quantized)
    else:
        logger.info_once("Some substitutes run dequantized, as dense weights: %s", obstacle)
        _use_dequantized(substitute, quantized)
    return substitute


def substitute_bytes(substitute: LinearBase) -> int:
    """Memory that a substitute takes besides what it shares."""
    method = substitute.quant_method
    weights = method.weights.parameters() if isinstance(method, KernelMethod) else [substitute.weight]
    return sum(weight.nbytes for weight in weights)


def _kernel_config(quantized: QuantizedWeight) -> MPLinearLayerConfig:
    out_size, in_size = quantized.codes.shape
    return MPLinearLayerConfig(
        full_weight_shape=(in_size, out_size),
        partition_weight_shape=(in_size, out_size),
        weight_type=scalar_types.uint4,
        act_type=quantized.scales.dtype,
        group_size=quantized.group_size,
        zero_points=True,
    )


def _obstacle(kernel_cls: type[MPLinearKernel] | None, config: MPLinearLayerConfig) -> str | None:
    """Why the kernel cannot take that weight, None if it can."""
    if kernel_cls is None:
        return "no 4-bit product on this device"
    if config.act_type not in (torch.bfloat16, torch.float16):
        return f"no 4-bit product in {config.act_type} keeps the quantized values exactly"
    if config.partition_weight_shape[1] % 8:
        return f"{config.partition_weight_shape[1]} outputs are not a multiple of 8"
    fits, why = kernel_cls.can_implement(config)
    return None if fits else why


class KernelMethod(LinearMethodBase):
    """A vLLM 4-bit kernel around one quantized weight."""

    def __init__(self, kernel_cls: type[MPLinearKernel], config: MPLinearLayerConfig, quantized: QuantizedWeight):
        self.weights = _packed(quantized)
        self.kernel = kernel_cls(config, "weight_packed", "weight_scale", "weight_zero_point")
        self.kernel.process_weights_after_loading(self.weights)

    def create_weights(self, *args, **kwargs):
        raise NotImplementedError("made from a QuantizedWeight")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # The bias is the target's own tensor, and kernels permute or convert theirs: it is added outside.
        out = self.kernel.apply_weights(self.weights, x)
        return out if bias is None else out + bias.to(out.dtype)


def _packed(quantized: QuantizedWeight) -> torch.nn.Module:
    """The weight in the layout of compressed-tensors, from which every vLLM kernel repacks into its own."""
    layout = {"input_dim": 1, "output_dim": 0, "weight_loader": None}
    pack = lambda t, dim: pack_quantized_values_into_int32(t.int(), scalar_types.uint4, dim)  # noqa: E731
    codes = quantized.codes
    packed = torch.empty(codes.shape[0], codes.shape[1] // 8, dtype=torch.int32, device=codes.device)
    for rows in slices(codes):  # four bytes a code while it is packed
        packed[rows] = pack(codes[rows], 1)
    packing = {"packed_factor": 8, **layout}
    weights = torch.nn.Module()
    weights.bias = None
    weights.weight_packed = PackedvLLMParameter(data=packed, packed_dim=1, **packing)
    weights.weight_scale = GroupQuantScaleParameter(data=quantized.scales, **layout)
    weights.weight_zero_point = PackedvLLMParameter(data=pack(quantized.zeros, 0), packed_dim=0, **packing)
    return weights


def _use_dequantized(linear: LinearBase, quantized: QuantizedWeight) -> None:
    """The quantized values as a dense weight, on vLLM's kernel for such. Exact; saves no memory."""
    linear._parameters["weight"] = torch.nn.Parameter(quantized.dequantize(), requires_grad=False)
    linear.quant_method = UnquantizedLinearMethod()
    linear.quant_method.process_weights_after_loading(linear)
