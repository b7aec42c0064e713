"""Weights in CPU memory are copied to the GPU before use: each pass streams them once."""

from __future__ import annotations

import pytest
import torch

from vllm_subspec.weights import uva


@pytest.fixture
def linears(vllm_parameters, monkeypatch):
    """vLLM linears, of which the first two claim to lie in CPU memory."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.utils import default_unquantized_gemm

    with set_current_vllm_config(VllmConfig()):
        model = torch.nn.ModuleList(
            [
                ReplicatedLinear(8, 12, bias=False, params_dtype=torch.float32),
                ReplicatedLinear(8, 5, bias=True, params_dtype=torch.float32),
                ReplicatedLinear(8, 5, bias=False, params_dtype=torch.float32),
            ]
        )
    for linear in model:
        monkeypatch.setattr(linear.quant_method, "_gemm_impl", default_unquantized_gemm)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.data)
    for linear in model[:2]:
        linear.weight._vllm_is_uva_offloaded = True
    uva.copy_before_use(model)
    return model


@pytest.mark.parametrize("compiler", [None, "eager", "inductor"])
def test_products_read_copies(linears, monkeypatch, compiler):
    """Catches: a tree that streams weights more than once; a copy of another linear's weight; a compiled model that
    multiplies by what the buffer held before."""
    read = []
    product = torch.nn.functional.linear
    recording = lambda x, w, b: read.append(w.data_ptr()) or product(x, w, b)  # noqa: E731
    monkeypatch.setattr(uva.torch.nn.functional, "linear", recording)
    forward = lambda x: [linear(x)[0] for linear in linears[:2]]  # noqa: E731
    if compiler:
        forward = torch.compile(forward, fullgraph=True, dynamic=True, backend=compiler)
    for rows in (1, 289):
        x = torch.randn(rows, 8)
        read.clear()
        for linear, out in zip(linears, forward(x)):
            torch.testing.assert_close(out, product(x, linear.weight, linear.bias))
        assert read == [linear.quant_method.copy.data_ptr() for linear in linears[:2]]


def test_one_buffer_for_all_and_none_for_resident_weights(linears):
    """Catches: a second copy of the model on a GPU that it does not fit on; resident weights copied."""
    methods = [linear.quant_method for linear in linears[:2]]
    assert len({m.copy.untyped_storage().data_ptr() for m in methods}) == 1
    assert methods[0].copy.untyped_storage().nbytes() == 12 * 8 * 4
    assert not isinstance(linears[2].quant_method, uva.CopiedWeightMethod)
    uva.copy_before_use(linears[2:])
    assert not isinstance(linears[2].quant_method, uva.CopiedWeightMethod)


def test_other_products_are_left_as_they_are(linears, monkeypatch):
    """Catches: a user's --linear-backend replaced."""
    linear = linears[2]
    linear.weight._vllm_is_uva_offloaded = True
    monkeypatch.setattr(linear.quant_method, "_gemm_impl", lambda layer, x, weight, bias: x)
    uva.copy_before_use(linears)
    assert not isinstance(linear.quant_method, uva.CopiedWeightMethod)


def test_nothing_is_kept_for_models_that_are_gone(vllm_parameters):
    """Catches: a buffer that outlives its engine."""
    weight, buffer = torch.ones(4, 4), torch.empty(64, dtype=torch.uint8)
    method = uva.CopiedWeightMethod(weight, buffer)
    assert weight.data_ptr() in uva.COPIES
    del method
    assert weight.data_ptr() not in uva.COPIES


@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_a_graph_made_with_the_buffer_runs_without(linears, monkeypatch, compiler):
    """Catches: a start with less memory that fails on, or multiplies wrongly by, a graph kept from the start before."""
    forward = lambda x: [linear(x)[0] for linear in linears[:2]]  # noqa: E731
    if compiler:
        forward = torch.compile(forward, fullgraph=True, dynamic=True, backend=compiler)
    x = torch.randn(3, 8)
    with_copies = forward(x)
    monkeypatch.setattr(uva, "COPIES", {})
    for linear, out, before in zip(linears, forward(x), with_copies):
        assert torch.equal(out, before)
        torch.testing.assert_close(out, torch.nn.functional.linear(x, linear.weight, linear.bias))


def test_the_graph_is_the_same_where_there_is_no_memory_for_the_buffer(linears, monkeypatch):
    """Catches: a start without the buffer that leaves a graph of plain products to the starts after it, which then
    stream weights several times a tree, with memory to spare."""
    forward, graphs = (lambda x: [linear(x)[0] for linear in linears[:2]]), []
    keep = lambda graph, inputs: graphs.append(graph.print_readable(print_output=False)) or graph.forward  # noqa: E731
    x = torch.randn(3, 8)
    expected = torch.compile(forward, fullgraph=True, backend=keep)(x)

    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("injected")

    for linear in linears[:2]:
        plain = linear.quant_method = type(linears[2].quant_method)()
        monkeypatch.setattr(plain, "_gemm_impl", linears[2].quant_method._gemm_impl)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        uva.copy_before_use(linears)
    assert not any(linear.weight.data_ptr() in uva.COPIES for linear in linears)
    torch._dynamo.reset()
    for out, want in zip(torch.compile(forward, fullgraph=True, backend=keep)(x), expected):
        assert torch.equal(out, want)
    assert graphs[0] == graphs[1] and "linear_in_cpu_memory" in graphs[0]
