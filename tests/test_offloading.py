"""What the log says at the start of what is offloaded, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_config import checkpoint  # noqa: F401  # fixture

from vllm_subspec.engine import offloading, support
from vllm_subspec.weights import draft
from vllm_subspec.weights.substitute import make_substitutes


@pytest.fixture
def model(vllm_parameters):
    """Three decoder layers of one bf16 linear each (8 KiB), and a head."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear

    def linear():
        return ReplicatedLinear(64, 64, bias=True, params_dtype=torch.bfloat16)

    with set_current_vllm_config(VllmConfig()):
        made = torch.nn.Module()
        made.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"proj": linear()}) for _ in range(3))
        made.head = linear()
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter.data)
    return made


@pytest.fixture
def said(model, monkeypatch):
    """The records of a start, by what is offloaded, which linears get substitutes, the device and vLLM's flags."""
    monkeypatch.setattr(offloading, "GIB", 1024)

    def run(offloaded: list[str], which: str = "auto", device: str = "cuda", group_size: int = 0, gb: float = 0.0):
        values = {name: p.data for name, p in model.named_parameters() if name in offloaded}
        for module in (offloading, draft):
            monkeypatch.setattr(module, "offloaded_parameters", lambda model: values)
        offload = SimpleNamespace(
            prefetch=SimpleNamespace(offload_group_size=group_size), uva=SimpleNamespace(cpu_offload_gb=gb)
        )
        config = SimpleNamespace(device_config=SimpleNamespace(device_type=device), offload_config=offload)
        spec = SimpleNamespace(substitute_layers=which, substitute_group_size=64, substitute_bits=4)
        records = []
        for level in ("info", "warning"):
            log = lambda text, *values, level=level: records.append((level, text % values))  # noqa: E731
            monkeypatch.setattr(offloading.logger, level, log)
        offloading.report_offloading(model, make_substitutes(model, spec, torch.device("cpu")), config, 1.25)
        return records

    return run


ONE, TWO = "layers.0.proj.weight", "layers.2.proj.weight"


def test_a_start_says_how_much_is_offloaded(said):
    """Catches: counts or sizes of something else than weights of decoder linears (biases, the head); substitutes of
    resident linears left out of their size; more than a line."""
    one_substitute = 64 * 64 / 2 + 64 * 2 + 64 / 2  # bytes: codes, scales, zero-points
    for which, made in (("auto", 2), ("all", 3)):
        assert said([ONE, "layers.0.proj.bias", TWO], which) == [
            (
                "info",
                "subspec: 2 of 3 decoder linears (16.00 of 24.00 GiB) are offloaded; "
                f"{made} have 4-bit substitutes ({made * one_substitute / 1024:.2f} GiB, made in 1.2 s)",
            )
        ]


def test_a_start_warns_where_nothing_is_offloaded(said):
    """Catches: a forgotten flag, or one that does nothing, without a word; the advice to give a flag that was given."""
    forgotten, given, also_given = said([]), said([], group_size=1), said([], gb=4)
    for ((level, text),) in (forgotten, given, also_given):
        assert level == "warning" and "none of the 3 decoder linears (24.00 GiB) is offloaded" in text
        assert "likely slower than plain vLLM; " in text and "leave the method out" in text
    assert forgotten[0][1].endswith("leave the method out, or offload what the GPU has no room for, as by "
                                    "--offload-group-size 1")  # fmt: skip
    assert given == also_given and "take nothing of Module" in given[0][1] and "--offload" not in given[0][1]


def test_a_start_on_a_cpu_says_that_nothing_is_offloaded(said):
    """Catches: a warning about what cannot be otherwise, or no word."""
    ((level, text),) = said([], device="cpu")
    assert level == "info" and "on a CPU nothing is offloaded" in text and "3 decoder linears have substitutes" in text


@pytest.mark.parametrize("flag,value", [("offload_group_size", 1), ("cpu_offload_gb", 2.0)])
def test_offloading_on_a_cpu_is_refused(monkeypatch, checkpoint, flag, value):  # noqa: F811
    """Catches: vLLM's assertion in an engine process, or a flag that does nothing; the refusal on a GPU."""
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(checkpoint, **{flag: value})
    monkeypatch.setattr(support, "is_cpu_build", lambda: True)
    with pytest.raises(
        ValueError, match=f"^subspec: nothing is offloaded on a CPU; leave --{flag.replace('_', '-')} out$"
    ):
        support.check_arguments(args)
    monkeypatch.setattr(support, "is_cpu_build", lambda: False)
    support.check_arguments(args)
