"""Substitutes: what the quantizer promises, and that a linear with one multiplies by exactly these values."""

from __future__ import annotations

import pytest
import torch

from vllm_subspec.weights.quantize import fitting_group_size, quantize

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


@pytest.mark.parametrize("size,expected", [(576, 64), (1536, 64), (96, 32), (60, 4)])
def test_group_size_divides_the_input(size, expected):
    """Catches: a group that would straddle two rows."""
    assert fitting_group_size(64, size) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 6, 33])
def test_the_4_bit_kernel_multiplies_by_exactly_the_quantized_values(vllm_parameters, monkeypatch, dtype, rows):
    """Catches: a packing in the wrong order, zero-points or scales of another group, a kernel that rounds them; rows
    lost or exchanged where large weights are worked on in slices."""
    from vllm_subspec.weights import quantize as module
    from vllm_subspec.weights import substitute

    monkeypatch.setattr(module, "MAX_WEIGHTS", 33 * 192)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(3)
    q = quantize((torch.randn(160, 192, device=device) * 0.05).to(dtype), 4, 64)
    config = substitute._kernel_config(q)
    kernel = substitute.KERNELS[device]
    assert substitute._obstacle(kernel, config) is None
    x = torch.randn(rows, 192, device=device).to(dtype)
    got = substitute.KernelMethod(kernel, config, q).apply(None, x)
    expected = x.double() @ q.dequantize().double().T
    eps = torch.finfo(dtype).eps
    assert (got.double() - expected).norm() / expected.norm() < eps
    # A unit vector reads the values out one by one.
    unit = torch.zeros(1, 192, device=device, dtype=dtype)
    unit[0, 77] = 1
    read = substitute.KernelMethod(kernel, config, q).apply(None, unit)[0]
    torch.testing.assert_close(read, q.dequantize()[:, 77], rtol=eps, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(37888, 3584), (3584, 18944), (4608, 3584)], ids=["gate_up", "down", "qkv"])
def test_making_a_substitute_takes_no_more_than_planned(vllm_parameters, shape):
    """Catches: copies of a whole weight while it is quantized or packed: out of memory on the card that was planned."""
    from types import SimpleNamespace

    from vllm_subspec.tools.plan.memory import Run, quantization_bytes
    from vllm_subspec.weights import substitute

    stored = torch.randn(shape, device="cuda").mul_(0.02).bfloat16().cpu()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    q = quantize(stored.cuda(), 4, 64)
    substitute.KernelMethod(substitute.KERNELS["cuda"], substitute._kernel_config(q), q)
    taken = torch.cuda.max_memory_allocated() - before
    planned = quantization_bytes(SimpleNamespace(linears={"": shape}), Run())
    print(f"{shape}: {taken / 2**20:.0f} MiB, planned {planned / 2**20:.0f}")
    assert taken <= 1.05 * planned
