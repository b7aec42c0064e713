"""Substitutes: what the quantizer promises, and that a linear with one multiplies by exactly these values."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_subspec.weights import substitute
from vllm_subspec.weights.quantize import quantize
from vllm_subspec.weights.storage import kernel_shape, stored_bytes

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape,group", [((48, 128), 64), ((7, 96), 32)])
def test_values_are_4_bit_with_integer_zero_points_along_the_input(dtype, shape, group):
    """Catches: groups along the wrong axis, more than 16 levels, a fractional zero-point, a useless approximation."""
    torch.manual_seed(0)
    weight = (torch.randn(shape) * 0.02).to(dtype)
    q = quantize(weight, bits=4, group_size=group)
    assert q.codes.dtype == q.zeros.dtype == torch.uint8
    assert q.codes.max() <= 15 and q.zeros.max() <= 15
    assert q.scales.shape == (shape[0], shape[1] // group) and q.scales.dtype == dtype
    row, start = 3, group  # one group by hand
    by_hand = [(int(c) - int(q.zeros[row, 1])) * float(q.scales[row, 1]) for c in q.codes[row, start : start + group]]
    got = q.dequantize()[row, start : start + group].float()
    torch.testing.assert_close(got, torch.tensor(by_hand), rtol=8e-3 if dtype == torch.bfloat16 else 1e-6, atol=0)
    error = (q.dequantize().float() - weight.float()).norm() / weight.float().norm()
    assert error < 0.12


def test_fused_rows_quantize_as_their_parts():
    """Catches: statistics shared between output rows (vLLM fuses q/k/v and gate/up)."""
    torch.manual_seed(1)
    a, b = torch.randn(16, 128), torch.randn(8, 128) * 5
    fused = quantize(torch.cat([a, b]), 4, 64).dequantize()
    # HQQ stops its iterations on the error of the whole weight, so the parts may differ by that: not more.
    parts = torch.cat([quantize(a, 4, 64).dequantize(), quantize(b, 4, 64).dequantize()])
    scale = torch.cat([a, b]).abs().amax(1, keepdim=True)
    assert ((fused - parts).abs() / scale).max() < 0.2


def test_better_than_rounding_to_nearest():
    """Catches: HQQ's optimization switched off or undone by the rounding of the zero-point."""
    torch.manual_seed(2)
    weight = torch.distributions.StudentT(3.0).sample((256, 256)) * 0.02
    groups = weight.view(-1, 64)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).round().clamp(0, 15)
    nearest = ((groups / scale + zero).round().clamp(0, 15) - zero) * scale
    hqq = quantize(weight, 4, 64).dequantize().view(-1, 64)
    p = 0.7  # the norm that HQQ minimizes
    assert (hqq - groups).abs().pow(p).mean() < (nearest - groups).abs().pow(p).mean() * 1.001


def squared_error(weight: torch.Tensor, group: int, start: int = 0) -> float:
    """Of the inputs from ``start`` on, relative."""
    wrong = quantize(weight, 4, group).dequantize() - weight
    return float(wrong[:, start:].square().sum() / weight[:, start:].square().sum())


@cache
def error_of_256() -> float:
    return squared_error(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.02, 64)


@settings(max_examples=25, deadline=None)
@given(width=st.integers(64, 1000), device=st.sampled_from(["cuda", "cpu"]), seed=st.integers(0, 2**16))
@example(width=65, device="cpu", seed=0)
@example(width=97, device="cuda", seed=0)
@example(width=127, device="cpu", seed=0)
@example(width=786, device="cuda", seed=0)
def test_any_width_is_quantized_as_well_as_256(width, device, seed):
    """Catches: groups of a few weights, or a short last group out of reach of its zero-point: widths of few factors of
    two, whose substitutes were bad (and larger than the weights)."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, width, generator=generator) * 0.02
    shape = kernel_shape(2048, width, 64, device)
    group = 64 if shape is None else shape.group_size
    assert squared_error(weight, group) < 1.1 * error_of_256()
    if short := width % group:
        assert squared_error(weight, group, width - short) < 1.1 * error_of_256()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_any_width_takes_at_most_5_bits_a_weight(device):
    """Catches: padding that costs more than it saves, scales that outweigh the codes, odd outputs left dense."""
    for width in range(64, 1001):
        for outputs in (64, 101, 768, 2049):
            assert stored_bytes(outputs, width, 64, 2, device) * 8 <= 5 * outputs * width, (outputs, width)


@pytest.mark.parametrize("size", [64, 576, 1536, 3584, 4544, 18944])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_usual_sizes_are_stored_as_they_are(size, group):
    """Catches: zeros or smaller groups where a kernel takes the weight with the groups that were asked for."""
    for device in ("cuda", "cpu"):
        shape = kernel_shape(1024, size, group, device)
        assert (shape.outputs, shape.inputs) == (1024, size)
        assert shape.group_size == group or size % group


def test_padding_is_what_marlin_takes():
    """Catches: sizes that Marlin would pad again, which plan and the padded activations would not know of."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_padded_nk

    for outputs, inputs in [(1000, 1000), (1344, 1000), (2049, 777), (4672, 4544), (960, 576), (320, 4097)]:
        for group in (32, 64, 128):
            shape = kernel_shape(outputs, inputs, group, "cuda")
            assert marlin_padded_nk(shape.outputs, shape.inputs, shape.group_size) == (shape.outputs, shape.inputs)
            padded = outputs, -(-inputs // group) * group
            assert shape.outputs * shape.inputs <= torch.tensor(marlin_padded_nk(*padded, group)).prod()


SHAPES = {"even": (320, 384), "odd": (509, 487), "no kernel": (150, 77)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_substitute_multiplies_by_exactly_the_quantized_values(vllm_parameters, monkeypatch, shape, dtype):
    """Catches: a packing in the wrong order, zero-points or scales of another group, a kernel that rounds them; rows
    lost or exchanged where large weights are worked on in slices; padding that takes part in the product; more memory
    than planned."""
    from vllm_subspec.weights import quantize as module

    monkeypatch.setattr(module, "MAX_WEIGHTS", shape[0] // 4 * shape[1])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(3)
    weight = (torch.randn(shape, device=device) * 0.05).to(dtype)
    in_kernel, _ = substitute._kernel_shape(weight, 64, device)
    assert (in_kernel is None) == (shape == SHAPES["no kernel"])
    q = quantize(weight, 4, 64 if in_kernel is None else in_kernel.group_size)
    method = substitute.method(q, in_kernel)
    bias = torch.randn(shape[0], device=device).to(dtype)
    eps = torch.finfo(dtype).eps
    for rows, b in ((1, None), (6, bias), (33, None)):
        x = torch.randn(rows, shape[1], device=device).to(dtype)
        got = method.apply(None, x, b)
        expected = x.double() @ q.dequantize().double().T + (0 if b is None else b.double())
        assert got.is_contiguous() and (got.double() - expected).norm() / expected.norm() < eps
    for column in (shape[1] // 2, shape[1] - 1):  # a unit vector reads the values out one by one
        unit = torch.zeros(1, shape[1], device=device, dtype=dtype)
        unit[0, column] = 1
        torch.testing.assert_close(method.apply(None, unit)[0], q.dequantize()[:, column], rtol=eps, atol=0)
    assert sum(t.nbytes for t in method.tensors()) == stored_bytes(*shape, 64, 2, device.type)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_no_kernel_takes_is_named_once(vllm_parameters, monkeypatch, dtype):
    """Catches: substitutes that are slow without a word, or a line for each layer."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    def layer() -> torch.nn.Module:
        made = {
            "wide": ReplicatedLinear(512, 256, params_dtype=dtype),
            "narrow": ReplicatedLinear(77, 150, params_dtype=dtype),
        }
        for linear in made.values():
            torch.nn.init.normal_(linear.weight, std=0.05)
        return torch.nn.ModuleDict(made)

    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer(), layer()])})
    spec = SimpleNamespace(substitute_layers="all", substitute_group_size=64, substitute_bits=4)
    lines = []
    monkeypatch.setattr(substitute.logger, "warning", lambda text, *args: lines.append(text % args))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert len(substitute.make_substitutes(model.to(device), spec, device)) == 4
    if dtype == torch.float32:  # dense, as the target's
        assert lines == []
    else:
        (line,) = lines
        assert "2 of 4" in line and "layers.*.narrow [150, 77]" in line and "wide" not in line


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(37888, 3584), (3584, 18944), (4608, 3584)], ids=["gate_up", "down", "qkv"])
def test_making_a_substitute_takes_no_more_than_planned(vllm_parameters, shape):
    """Catches: copies of a whole weight while it is quantized or packed: out of memory on the card that was planned."""
    from vllm_subspec.tools.plan.memory import Run, quantization_bytes

    stored = torch.randn(shape, device="cuda").mul_(0.02).bfloat16().cpu()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    q = quantize(stored.cuda(), 4, 64)
    substitute.method(q, kernel_shape(*shape, 64, "cuda"))
    taken = torch.cuda.max_memory_allocated() - before
    planned = quantization_bytes(SimpleNamespace(linears={"": shape}), Run())
    print(f"{shape}: {taken / 2**20:.0f} MiB, planned {planned / 2**20:.0f}")
    assert taken <= 1.05 * planned
