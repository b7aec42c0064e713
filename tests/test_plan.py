"""`vllm-subspec plan`: sizes, the choice of layers, vLLM's flags, and what the user is told."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published import (
    GEMMA2_2B,
    GEMMA3_1B,
    GRANITE_8B,
    LLAMA3_8B,
    MISTRAL_7B,
    OLMO2_7B,
    PHI3_MINI,
    QWEN2_7B,
    QWEN3_8B,
    SMOLLM2,
    SMOLLM3_3B,
    assert_refused,
)  # fmt: skip

from vllm_subspec.round import verify as sampler
from vllm_subspec.tools.cli import main
from vllm_subspec.tools.plan.advise import DoesNotFit, Placement, Plan, default_context, make_plan, placements
from vllm_subspec.tools.plan.fastest import fastest_plan
from vllm_subspec.tools.plan.gpu import Gpu
from vllm_subspec.tools.plan.host import PROCESSES, Host, Need, needed, obstacles, this_host
from vllm_subspec.tools.plan.memory import (
    CUDA_CONTEXT,
    LIBRARIES,
    ROWS_AT_ONCE,
    TENSOR_SLACK,
    Run,
    kv_bytes,
    offloaded_memory,
    plain_memory,
    prefetch_bytes,
    substitute_bytes,
    without_kernel,
)  # fmt: skip
from vllm_subspec.tools.plan.model import Layer, Model, load_model, model_from_config
from vllm_subspec.tools.plan.speed import GB, Bandwidth, expect
from vllm_subspec.tools.sizes import GIB, MIB, parse_size

# --- sizes


@pytest.mark.parametrize(
    "config,billions,tied",
    [
        (QWEN2_7B, 7.6156, False), (LLAMA3_8B, 8.0303, False), (SMOLLM2, 0.1345, True), (QWEN3_8B, 8.1907, False),
        (MISTRAL_7B, 7.2480, False), (PHI3_MINI, 3.8211, False), (GEMMA2_2B, 2.6143, True), (GEMMA3_1B, 0.9999, True),
        (OLMO2_7B, 7.2986, False), (GRANITE_8B, 8.1708, True), (SMOLLM3_3B, 3.0751, True),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_published_checkpoints(config, billions, tied):
    """Catches: a bias, norm or head left out or counted twice, a tied head counted as another matrix."""
    model = model_from_config(config, "m")
    assert round(model.parameters / 1e9, 4) == billions
    assert (model.head == 0) == tied
    assert model.embedding == config["vocab_size"] * config["hidden_size"]
    assert len(model.layers) == config["num_hidden_layers"]


def test_sizes_of_qwen2_7b():
    """Catches: layers, ends and substitutes off the figures known for this model."""
    model = model_from_config(QWEN2_7B, "m")
    assert round(sum(layer.parameters for layer in model.layers) * 2 / 1e9, 2) == 13.05
    assert round((model.embedding + model.head) * 2 / 1e9, 2) == 2.18
    assert round(sum(layer.linear_parameters for layer in model.layers) / 1e9, 3) == 6.525
    assert {layer.parameters for layer in model.layers} == {233_057_792}
    # Half a byte a weight, and 2.5 bytes for each group of 64: 4.3125 bits. And what torch adds to each of 3 tensors.
    slack = 3 * 4 * TENSOR_SLACK
    substitutes = sum(substitute_bytes(layer, Run()) - 2 * layer.others - slack for layer in model.layers)
    assert substitutes == sum(layer.linear_parameters for layer in model.layers) * 4.3125 / 8
    assert round(substitutes / 1e9, 2) == 3.52


def test_substitutes_take_what_is_stored(vllm_parameters):
    """Catches: codes, scales or zero-points stored in another width than planned."""
    from vllm_subspec.weights.quantize import quantize
    from vllm_subspec.weights.storage import KernelShape
    from vllm_subspec.weights.substitute import _packed

    packed = _packed(quantize(torch.randn(128, 192).bfloat16(), 4, 64), KernelShape(128, 192, 64))
    stored = sum(t.nbytes for t in (packed.weight_packed, packed.weight_scale, packed.weight_zero_point))
    assert substitute_bytes(Layer({"w": (128, 192)}, 0), Run()) == stored
    # What Marlin takes only with many zeros is kept as two codes a byte; each of 4 groups has a zero-point of a byte.
    assert substitute_bytes(Layer({"w": (128, 200)}, 0), Run()) == 128 * (100 + 4 * 3)
    assert substitute_bytes(Layer({"w": (128, 192)}, 0), Run(itemsize=4)) == 128 * 192 * 4


def test_substitutes_without_a_kernel_are_named_with_their_cost():
    """Catches: a plan of slow or large substitutes that does not say so; a cost other than what is planned."""
    odd = Layer({"mlp.down_proj.weight": (128, 200), "qkv": (129, 192), "o": (128, 192), "up": (1000, 777)}, 10)
    said = without_kernel([odd] * 2, Run())
    assert said.count("mlp.down_proj 128 x 200") == said.count("qkv 129 x 192") == 1
    assert "o 128" not in said and "up" not in said
    assert without_kernel([Layer({"o": (128, 192)}, 10)], Run()) is None
    assert "float32" in without_kernel([odd], Run(itemsize=4))

    layers = model_from_config(QWEN2_7B, "m").layers
    dense, packed = (substitute_bytes(layers[0], Run(itemsize=size)) - size * layers[0].others for size in (4, 2))
    taken, instead = map(float, re.findall(r"([\d.]+) GiB", without_kernel(layers, Run(itemsize=4))))
    assert taken - instead == pytest.approx(28 * (dense - packed) / GIB, rel=0.01)


def test_a_width_without_factors_of_two_takes_little_more():
    """Catches: groups of 4, whose scales and zero-points outweigh the codes, planned or made."""
    odd, even = (model_from_config({**QWEN2_7B, "intermediate_size": n}, "m").layers[0] for n in (18948, 18944))
    assert substitute_bytes(odd, Run()) < 1.01 * substitute_bytes(even, Run())


def test_plan_names_what_no_kernel_takes(checkpoint, capsys):
    """Catches: substitutes that are slower, without a reason, where the model fits and where it does not."""
    path = checkpoint({**QWEN2_7B, "intermediate_size": 330})
    assert main(["plan", path, "--vram", "4.5", "--pcie", "25", "--bandwidth", "1000"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "down_proj 3584 x 330" in line]
    assert len(lines) == 1 and "many zeros" in lines[0]
    assert_refused(capsys, ["plan", path, "--vram", "3"], ["smallest VRAM", "down_proj 3584 x 330", "many zeros"])


def test_defaults_are_the_speculative_configs():
    """Catches: a tree or group size planned for that is not what runs."""
    from vllm_subspec.engine.config import SubSpecConfig

    fields = SubSpecConfig.__dataclass_fields__
    default = lambda name: getattr(fields[name].default, "default", fields[name].default)  # noqa: E731
    assert (Run.tree_width, Run.tree_depth) == (default("tree_width"), default("tree_depth"))
    assert Run.group_size == default("substitute_group_size")
    assert ROWS_AT_ONCE == sampler.ROWS_AT_ONCE


def test_kv_cache_covers_vllms_own_size():
    """Catches: fewer blocks than vLLM wants at its start, with the null block it holds back; kv heads or head size."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    model = model_from_config(QWEN2_7B, "m")
    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=128, dtype=torch.bfloat16)
    for context in (1, 16, 17, 4096):
        needed = (-(-context // 16) + 1) * spec.page_size_bytes * 28
        assert needed <= kv_bytes(model, Run(context=context)) <= needed + spec.page_size_bytes * 28


def test_prefetch_buffers_are_vllms():
    """Catches: slots or shapes that vLLM's pool does not have."""
    from vllm.model_executor.offloader.prefetch import ParamInfo, StaticBufferPool

    layer = Layer({"qkv_proj.weight": (96, 64), "down_proj.weight": (64, 128)}, 0)
    infos = [ParamInfo(n, shape, (shape[1], 1), torch.bfloat16) for _ in range(3) for n, shape in layer.linears.items()]
    for step in (1, 2):
        pool = StaticBufferPool(infos, step, torch.device("cpu"))
        assert prefetch_bytes([layer] * 3, step, 2) == pool.total_bytes


# --- CPU memory


def machine(root, files: dict[str, str]) -> Host:
    """A machine that has these files and nothing else."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return this_host(root)


FREE = {"proc/meminfo": "MemTotal: 40 kB\nMemAvailable:   16777216 kB\n", "proc/version": "Linux version 6.8 (gcc)"}
STAT = "anon 5\nactive_file 1073741824\ninactive_file 1073741824\n"


@pytest.mark.parametrize(
    "files,available,limit",
    [
        ({}, 16 * GIB, "MemAvailable"),
        (  # v2, in a container that sees its own group as the root: 2 of the 6 GiB in use are file pages
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
             "sys/fs/cgroup/memory.current": f"{6 * GIB}\n", "sys/fs/cgroup/memory.stat": STAT},
            4 * GIB, "control group",
        ),
        (  # v2: the limit is one of a group above
            {"proc/self/cgroup": "0::/user/session\n", "sys/fs/cgroup/user/session/memory.max": "max\n",
             "sys/fs/cgroup/user/session/memory.current": "1\n", "sys/fs/cgroup/user/memory.max": f"{GIB}\n",
             "sys/fs/cgroup/user/memory.current": "0\n"},
            GIB, "control group",
        ),
        (  # v1, whose path is that of the host; unlimited is a huge number
            {"proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/x\n",
             "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
             "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{6 * GIB}\n",
             "sys/fs/cgroup/memory/memory.stat": f"active_file 0\ntotal_active_file {GIB}\ntotal_inactive_file 0\n"},
            3 * GIB, "control group",
        ),
        (
            {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
             "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n"},
            16 * GIB, "MemAvailable",
        ),
        ({"proc/self/cgroup": "0::/\n"}, 16 * GIB, "MemAvailable"),
    ],
)  # fmt: skip
def test_available_memory_is_the_tightest_limits(tmp_path, files, available, limit):
    """Catches: a container's limit overlooked, file pages counted as taken, a machine without limits refused."""
    host = machine(tmp_path, {**FREE, **files})
    assert host.available == available and limit in host.limit and not host.wsl


def test_a_machine_that_says_nothing_is_not_refused(tmp_path):
    """Catches: a crash, or a refusal, where there is no /proc."""
    host = machine(tmp_path, {})
    assert host.available is None and not obstacles(Need(10 * GIB, 5 * GIB), host, {})


def test_wsl_is_told(tmp_path):
    """Catches: WSL not recognized; a server that cannot pin memory there."""
    host, need = machine(tmp_path, {**FREE, "proc/version": "Linux 5.15.90.1-microsoft-standard-WSL2"}), Need(1, 1)
    assert host.wsl
    (said,) = obstacles(need, host, {})
    assert "VLLM_WSL2_ENABLE_PIN_MEMORY=1" in said
    assert not obstacles(need, host, {"VLLM_WSL2_ENABLE_PIN_MEMORY": "1"})
    assert not obstacles(need, machine(tmp_path, FREE), {})


def test_pinned_copies_are_counted_as_torch_makes_them():
    """Catches: weights counted once, though vLLM pins a second copy of each while it loads; torch's rounding.

    4 tensors of 26, 259, 130 and 33 MiB, pinned on a GPU machine (torch 2.11), took 864 MiB; pinned again, 1728; and
    still 1728 when the first were freed.
    """
    layer = Layer({"a": (26, MIB // 2), "b": (259, MIB // 2), "c": (130, MIB // 2), "d": (33, MIB // 2)}, 0)
    model = dataclasses.replace(small_model(1, vocab=1000), layers=(layer,))
    plan = Plan(model, Run(), GIB, GIB, False, Placement(1, 1, 1), plain_memory(model, Run()))
    assert needed(plan, exact=False) == Need(PROCESSES + 1728 * MIB, PROCESSES + 1728 * MIB)
    assert needed(plan, exact=True) == Need(PROCESSES + 2 * 448 * MIB, PROCESSES + 448 * MIB)


def test_plan_says_what_cpu_memory_is_missing(checkpoint, capsys, monkeypatch):
    """Catches: a plan for a machine that would be out of memory after minutes of loading."""
    monkeypatch.setattr("vllm_subspec.tools.plan.report.this_host", lambda: Host(16 * GIB, "MemAvailable", False))
    command = ["plan", checkpoint(), "--vram", "8", "--pcie", "25", "--bandwidth", "1000"]
    assert main(command) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "would not start" in line]
    assert "16.00 GiB are available" in line and "are missing" in line
    monkeypatch.setattr("vllm_subspec.tools.plan.report.this_host", lambda: Host(64 * GIB, "MemAvailable", True))
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "missing" not in out and "On WSL" in out and "VLLM_WSL2_ENABLE_PIN_MEMORY" in out


# --- the choice


def small_model(layers: int, hidden: int = 512, mlp: int = 2048, vocab: int = 32000, tied: bool = False) -> Model:
    attention = {"qkv": (3 * hidden, hidden), "o": (hidden, hidden)}
    layer = Layer({**attention, "gate_up": (2 * mlp, hidden), "down": (hidden, mlp)}, 2 * hidden)
    ends = vocab * hidden
    return Model("small", (layer,) * layers, ends, 0 if tied else ends, hidden, hidden, vocab, 4, 64, 1, 8192, False)


MODELS = st.builds(
    small_model, layers=st.integers(1, 12), hidden=st.sampled_from([256, 1024, 2048]),
    mlp=st.sampled_from([1024, 8192]), vocab=st.sampled_from([1000, 64000]), tied=st.booleans(),
)  # fmt: skip
RUNS = st.builds(Run, context=st.integers(16, 8192), chunk=st.sampled_from([289, 512, 2048]))
VRAM = st.integers(1, 6 * 1024).map(lambda mib: mib * MIB)


def resident(plan) -> int:
    return len(plan.model.layers) - len(plan.offloaded)


@settings(max_examples=150, deadline=None)
@given(MODELS, RUNS, VRAM, st.integers(0, 2 * GIB))
def test_more_memory_never_means_fewer_resident_layers(model, run, vram, more):
    """Catches: a choice that skips a placement, a total above the cap."""
    try:
        plan = make_plan(model, run, vram)
    except DoesNotFit:
        return
    larger = make_plan(model, run, vram + more)
    assert resident(larger) >= resident(plan)
    for p in (plan, larger):
        assert p.memory.total <= p.vram
        assert all(size >= 0 for size in vars(p.memory).values())


@settings(max_examples=150, deadline=None)
@given(MODELS, RUNS, VRAM)
def test_no_placement_with_more_resident_layers_fits(model, run, vram):
    """Catches: a choice that is not the best, by all that vLLM's numbers can say."""
    try:
        best = resident(make_plan(model, run, vram))
    except DoesNotFit:
        best = -1
    num_layers = len(model.layers)
    fitting = [num_layers] if plain_memory(model, run).total <= vram else []
    for group_size in range(1, num_layers + 1):
        for num_in_group in range(1, group_size + 1):
            offloaded = Placement(group_size, num_in_group, 1).offloaded(num_layers)
            if offloaded_memory(model, run, offloaded, 1).total <= vram:
                fitting.append(num_layers - len(offloaded))
    assert best == max(fitting, default=-1)


@settings(max_examples=100, deadline=None)
@given(MODELS, RUNS)
def test_the_smallest_memory_said_is_enough_and_less_is_not(model, run):
    """Catches: a remedy that does not work, or asks for too much."""
    with pytest.raises(DoesNotFit) as error:
        make_plan(model, run, MIB)
    mib = int(re.search(r"(\d+)MiB", str(error.value))[1])
    assert make_plan(model, run, parse_size(f"{mib}MiB")).memory.total <= mib * MIB
    with pytest.raises(DoesNotFit):
        make_plan(model, run, (mib - 1) * MIB)


@settings(max_examples=100, deadline=None)
@given(MODELS, RUNS, VRAM, st.integers(0, 100 * GIB))
def test_vllms_share_holds_what_vllm_counts(model, run, vram, rest):
    """Catches: a utilization that leaves too little for the KV cache, or that lets vLLM grow beyond the cap."""
    try:
        plan = make_plan(model, run, vram, vram + rest)
    except DoesNotFit:
        return
    on_top = plan.memory.cuda_context + plan.memory.cuda_graphs
    share = plan.gpu_memory_utilization * plan.gpu_total
    assert share + on_top <= vram
    assert share >= plan.memory.total - plan.memory.loading - on_top - 1.001e-5 * plan.gpu_total
    assert 0 < plan.gpu_memory_utilization < 1


def test_making_substitutes_is_planned_for():
    """Catches: a card on which the engine serves but does not load."""
    model, run = small_model(2, hidden=2048, mlp=4096, vocab=1000), Run(context=64)
    memory = offloaded_memory(model, run, (0, 1), 1)
    n = 2 * 4096 * 2048  # gate and up: weight, codes in bytes; and ten float32 copies of the 2**23 under work
    weights = memory.embedding + memory.head + memory.other_weights + memory.substitutes
    weights += memory.cuda_context + memory.libraries
    assert memory.total == weights + n * (2 + 1) + 2**23 * 40


def test_paper_size():
    """Catches: a plan far from the 7.1 GB that the paper gives as the least for Qwen2.5 7B (context 2048, fp16).

    That is a few hundred MB less than a process takes of the GPU, so it is compared with what torch allocates.
    """
    with pytest.raises(DoesNotFit) as error:
        make_plan(model_from_config(QWEN2_7B, "m"), Run(context=2048), GIB)
    process = int(re.search(r"(\d+)MiB", str(error.value))[1]) * MIB
    assert 6.8e9 < process - CUDA_CONTEXT - LIBRARIES < 7.6e9


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 10**6))
def test_vllm_offloads_the_planned_layers(num_layers, pick):
    """Catches: another rule for group size and number in group than that of vLLM's offloader, which is run here."""
    from unittest import mock

    from vllm.model_executor.offloader import prefetch

    choices = list(placements(num_layers))
    placement = choices[pick % len(choices)]
    offloader = object.__new__(prefetch.PrefetchOffloader)  # its __init__ wants a CUDA stream
    offloader.group_size, offloader.num_in_group = placement.group_size, placement.num_in_group
    offloader.offload_params, offloader.module_offloaders = set(), []
    offloader.mode, offloader.copy_stream = "cpu", None
    modules = [torch.nn.Linear(1, 1) for _ in range(num_layers)]
    with mock.patch.object(prefetch, "_ModuleOffloader", lambda module, **_: module):
        offloader.wrap_modules(iter(modules))
    assert tuple(modules.index(m) for m in offloader.module_offloaders) == placement.offloaded(num_layers)


def test_every_number_of_layers_can_be_offloaded():
    """Catches: counts that the enumeration leaves out; a placement said twice."""
    for num_layers in (1, 7, 28):
        offloaded = [p.offloaded(num_layers) for p in placements(num_layers) if p.prefetch_step == 1]
        assert len(set(offloaded)) == len(offloaded)
        assert {len(o) for o in offloaded} == set(range(1, num_layers + 1))


# --- speed


def test_expected_speed_is_the_formula():
    """Catches: bytes or bandwidths mixed up; tau / (D t_draft + t_verify) done otherwise."""
    model = model_from_config(QWEN2_7B, "m")
    plan = make_plan(model, Run(), 8 * GIB)
    found = expect(plan, Bandwidth(25 * GB, "given"), Bandwidth(1000 * GB, "given"), [1.0, 20.0])
    streamed = len(plan.offloaded) * 2 * 233_057_792
    assert plan.offloaded_bytes == streamed
    assert found.t_target == pytest.approx(streamed / 25e9)
    in_slots = plan.placement.prefetch_step * 2 * 233_057_792  # when the pass begins
    assert found.t_verify == pytest.approx((streamed - in_slots) / 25e9)
    draft = (plan.memory.substitutes + plan.memory.resident_layers + 2 * 152064 * 3584) / 1e12 + 28 * 67e-6
    assert found.t_draft == pytest.approx(draft)
    speed, speedup = found.by_tau[20.0]
    assert found.t_round == pytest.approx(48 * draft + found.t_verify)
    assert speed == pytest.approx(20 / found.t_round)
    assert speedup == pytest.approx(speed * found.t_target)
    fast = expect(plan, Bandwidth(10**6 * GB, "given"), Bandwidth(1000 * GB, "given"), [20.0])
    assert fast.t_target == pytest.approx((28 * 2 * 233_057_792 + 2 * 152064 * 3584) / 1e12)  # reading the weights
    assert fast.t_verify == pytest.approx(2 * fast.t_target)
    assert found.t_first == pytest.approx(2 * found.t_target)  # a prompt of 1000 tokens in two chunks of 512
    assert fast.t_first == pytest.approx(1000 * 2 / 289 * fast.t_target)


def test_slots_fill_no_faster_than_the_draft_gives_time():
    """Catches: a stream that PCIe cannot carry; substitutes of resident layers read in 16 bits."""
    model = model_from_config(QWEN2_7B, "m")
    run = Run(substitute_all=True)
    plan = make_plan(model, run, 12 * GIB)
    links = Bandwidth(1 * GB, "given"), Bandwidth(1000 * GB, "given")
    slow = expect(dataclasses.replace(plan, placement=dataclasses.replace(plan.placement, prefetch_step=9)), *links, [])
    draft = (plan.memory.substitutes + 2 * 152064 * 3584) / 1e12 + 28 * 67e-6
    assert plan.memory.substitutes == sum(substitute_bytes(layer, run) for layer in model.layers)
    assert slow.t_draft == pytest.approx(draft)
    assert slow.t_verify == pytest.approx(plan.offloaded_bytes / 1e9 - 48 * draft)


LINKS = st.builds(
    lambda pcie, gpu: (Bandwidth(pcie * GB, "given"), Bandwidth(gpu * GB, "given")), st.integers(1, 60),
    st.integers(100, 4000),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(MODELS, RUNS, VRAM, LINKS)
def test_no_plan_is_faster_than_the_fastest(model, run, vram, links):
    """Catches: a placement that is not weighed, a plan above the cap, a substitute that the user did not want."""
    try:
        plain = make_plan(model, run, vram)
    except DoesNotFit:
        return
    found = fastest_plan(plain, *links)
    assert found.memory.total <= vram and (found.placement is None) == (plain.placement is None)
    assert not fastest_plan(plain, *links, any_substitutes=False).run.substitute_all
    if plain.placement is None:
        return
    best, layers = expect(found, *links, []).t_round, len(model.layers)
    for chosen in (run, dataclasses.replace(run, substitute_all=True)):
        for placement in placements(layers):
            offloaded = placement.offloaded(layers)
            for step in range(1, len(offloaded) + 1):
                memory = offloaded_memory(model, chosen, offloaded, step)
                if memory.total <= vram:
                    other = dataclasses.replace(placement, prefetch_step=step)
                    plan = dataclasses.replace(plain, run=chosen, placement=other, memory=memory)
                    assert best <= expect(plan, *links, []).t_round * (1 + 1e-9)


# --- vLLM's flags


def test_flags_are_understood_by_vllm(checkpoint):
    """Catches: an option that vLLM does not have, a value it reads otherwise, combinations it refuses."""
    from vllm.config import CompilationMode
    from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    model = load_model(checkpoint())
    for vram in (8 * GIB, 12 * GIB, 24 * GIB):
        plan = make_plan(model, Run(), vram, 80 * GIB)
        words = [word for flag, values in plan.flags("bfloat16").items() for word in (flag, *values)]
        args = EngineArgs.from_cli_args(parser.parse_args(["--model", model.name, *words]))
        assert (args.dtype, args.max_model_len) == ("bfloat16", 4096)
        assert (args.max_num_seqs, args.max_num_batched_tokens) == (1, 512)
        assert args.gpu_memory_utilization == plan.gpu_memory_utilization
        if plan.placement is None:
            assert args.speculative_config is None and args.offload_group_size == 0
            continue
        assert args.speculative_config == {"method": "subspec"} and args.offload_backend == "prefetch"
        assert args.compilation_config.mode == CompilationMode.NONE
        numbers = dict(
            offload_group_size=args.offload_group_size, offload_num_in_group=args.offload_num_in_group,
            offload_prefetch_step=args.offload_prefetch_step,
        )  # fmt: skip
        OffloadConfig(offload_backend=args.offload_backend, prefetch=PrefetchOffloadConfig(**numbers))
        assert Placement(*numbers.values()).offloaded(28) == plan.offloaded


# --- the commands


def test_plan_prints_a_command_that_reads_back(checkpoint, capsys):
    """Catches: a command that a shell splits otherwise, a plan that says other numbers than its flags."""
    path = checkpoint()
    assert main(["plan", path, "--vram", "8GiB", "--pcie", "25", "--bandwidth", "1000", "--tau", "20"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("vllm serve")]
    words = shlex.split(line)
    assert words[:3] == ["vllm", "serve", path]
    found = dict(zip(words[3::2], words[4::2]))
    assert json.loads(found["--speculative-config"]) == {"method": "subspec"}
    placement = Placement(*(int(found[f"--offload-{n}"]) for n in ("group-size", "num-in-group", "prefetch-step")))
    streamed = len(placement.offloaded(28))
    assert f"{28 - streamed} of 28 layers resident, {streamed} streamed" in out
    assert "25 GB/s (given)" in out and "1000 GB/s (given)" in out


def test_plan_mentions_a_faster_one_and_prints_it(checkpoint, capsys):
    """Catches: a hint that is none, flags that do not say what was planned."""
    command = ["plan", checkpoint(), "--vram", "12GiB", "--pcie", "25", "--bandwidth", "1000"]
    assert main(command) == 0
    out = capsys.readouterr().out
    (hint,) = [line for line in out.splitlines() if "--fastest" in line]
    assert main([*command, "--fastest"]) == 0
    out = capsys.readouterr().out
    assert hint.split("--fastest: ")[1] in out and "--fastest" not in out
    (line,) = [line for line in out.splitlines() if line.startswith("vllm serve")]
    spec = json.loads(shlex.split(line)[-1])
    assert spec == {"method": "subspec", "substitute_layers": "all"} and "substitutes for all" in out


def test_plan_says_when_everything_fits(checkpoint, capsys):
    """Catches: offload flags, or a promise of speed, where there is nothing to offload."""
    assert main(["plan", checkpoint(SMOLLM2), "--vram", "8"]) == 0
    out = capsys.readouterr().out
    assert "all 30 layers fit" in out and "plain vLLM is likely the faster choice" in out
    assert "--offload" not in out and "speculative" not in out


def test_plan_as_json(checkpoint, capsys):
    """Catches: output that is not JSON alone, items that do not add up."""
    assert main(["plan", checkpoint(), "--vram", "9GB", "--context", "2048", "--json", "--pcie", "12.5"]) == 0
    plan = json.loads(capsys.readouterr().out)
    total = plan["memory"].pop("total")
    assert sum(plan["memory"].values()) == total <= plan["vram"] == 9 * 10**9
    assert plan["pcie"] == {"bytes_per_second": 12.5e9, "source": "given"}
    assert plan["run"]["context"] == 2048 and plan["flags"]["--max-model-len"] == ["2048"]
    assert len(plan["offloaded_layers"]) * 2 * 233_057_792 == plan["offloaded_bytes"]
    assert [e["tau"] for e in plan["expected"]] == [8, 13, 20, 28]


@pytest.mark.parametrize(
    "text,size",
    [("8GiB", 8 * 2**30), ("8GB", 8 * 10**9), ("8192MiB", 2**33), ("8", 2**33), ("7.5", 15 * 2**29), ("8 gib", 2**33)],
)
def test_sizes_are_read(text, size):
    """Catches: GB read as GiB or the reverse."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "options,words",
    [
        (["--vram", "lots"], ["--vram", "8GiB", "'lots'"]),
        (["--vram", "-8GiB"], ["--vram", "above zero"]),
        (["--vram", "0"], ["--vram", "above zero"]),
        (["--vram", "8TB"], ["--vram", "8192MiB"]),
        (["--vram", "6GiB"], ["does not fit in 6.00 GiB", "smallest VRAM", "MiB"]),
        (["--vram", "8GiB", "--context", "-1"], ["--context", "above zero"]),
        (["--vram", "8GiB", "--context", "40000"], ["40000", "32768 positions"]),
        (["--vram", "8GiB", "--pcie", "-3"], ["--pcie", "above zero"]),
        (["--vram", "8GiB", "--pcie", "nan"], ["--pcie", "above zero"]),
        (["--vram", "8GiB", "--bandwidth", "0"], ["--bandwidth", "above zero"]),
        (["--vram", "8GiB", "--tau", "60"], ["--tau", "1 to 49"]),
    ],
)
def test_bad_options_get_one_sentence(checkpoint, capsys, options, words):
    """Catches: a traceback, a zero exit status, a sentence that does not name the option."""
    assert_refused(capsys, ["plan", checkpoint(), *options], words)


@pytest.mark.parametrize(
    "config,words",
    [
        ({"model_type": "mixtral"}, ["mixture-of-experts"]),
        ({"model_type": "qwen3_moe"}, ["mixture-of-experts"]),
        ({"model_type": "gemma3"}, ["multimodal", "text-only"]),
        ({"model_type": "llava"}, ["multimodal"]),
        ({"model_type": "t5"}, ["encoder-decoder"]),
        ({"model_type": "mamba"}, ["linear_attention"]),
        ({"model_type": "deepseek_v3"}, ["multi-head latent attention"]),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, ["no text-generating decoder"]),
        ({**LLAMA3_8B, "quantization_config": {"quant_method": "gptq"}}, ["quantized", "unquantized checkpoint"]),
        ({**LLAMA3_8B, "hidden_size": 4097}, ["config.json", "multiple"]),
        ({"model_type": "hal9000"}, ["hal9000"]),
        ({"hidden_size": 3}, ["no model_type"]),
        ("[1]", ["no model_type"]),
        ("{", ["not JSON"]),
    ],
)
def test_other_models_are_refused_by_what_they_are(checkpoint, capsys, config, words):
    """Catches: sizes made up for what subspec does not serve."""
    assert_refused(capsys, ["plan", checkpoint(config), "--vram", "8GiB"], words)


def test_missing_models(tmp_path, capsys):
    """Catches: a traceback of the hub's client; a message that leaves open whether a directory was looked for."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert_refused(capsys, ["plan", str(tmp_path / "empty"), "--vram", "8"], ["no config.json"])
    assert_refused(capsys, ["plan", str(tmp_path / "file"), "--vram", "8"], ["is a file"])
    assert_refused(capsys, ["plan", str(tmp_path / "absent"), "--vram", "8"], ["no directory"])
    # The test suite runs with the hub switched off.
    assert_refused(capsys, ["plan", "someone/something", "--vram", "8"], ["no directory", "hub cannot be reached"])


@pytest.mark.parametrize(
    "error,words",
    [
        ("RepositoryNotFoundError", "shows no model"),
        ("GatedRepoError", "gated"),
        ("RemoteEntryNotFoundError", "no config.json"),
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("HFValidationError", "no such names"),
    ],
)
def test_what_the_hub_answers_is_told_apart(capsys, monkeypatch, error, words):
    """Catches: a gated or misspelt model reported as a network that is down."""
    from huggingface_hub import errors

    def download(*_, **__):
        raise getattr(errors, error).__new__(getattr(errors, error))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert_refused(capsys, ["plan", "someone/something", "--vram", "8"], ["no directory someone/something", words])


def test_a_gpu_that_is_too_small(checkpoint, capsys, monkeypatch):
    """Catches: a utilization above 1; a plan for a card that is not there."""
    monkeypatch.setattr("vllm_subspec.tools.plan.report.this_gpu", lambda: Gpu(6 * GIB))
    assert_refused(capsys, ["plan", checkpoint(), "--vram", "8GiB"], ["more than the 6.00 GiB", "6144MiB or less"])


@pytest.mark.parametrize("others, said", [(0, False), (300 * MIB, True)])
def test_memory_that_others_hold_is_told(checkpoint, capsys, monkeypatch, others, said):
    """Catches: a plan for a whole card that a desktop has a part of, which vLLM refuses to start."""
    monkeypatch.setattr("vllm_subspec.tools.plan.report.this_gpu", lambda: Gpu(8 * GIB, others))
    assert main(["plan", checkpoint(), "--vram", "8GiB", "--pcie", "25", "--bandwidth", "1000"]) == 0
    assert ("--vram 7892MiB" in capsys.readouterr().out) == said


def test_a_card_by_the_size_on_its_box_is_planned_for_as_it_is(checkpoint, capsys, monkeypatch):
    """Catches: 8GiB refused on a card of "8 GB" that reports less, or planned for as if it had them."""
    monkeypatch.setattr("vllm_subspec.tools.plan.report.this_gpu", lambda: Gpu(int(7.6 * GIB)))
    for more in ([], ["--fastest"]):
        command = ["plan", checkpoint(), "--vram", "8GiB", "--pcie", "25", "--bandwidth", "1000", "--json", *more]
        assert main(command) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["vram"] == plan["gpu_total"] == int(7.6 * GIB) >= plan["memory"]["total"]


# --- on a GPU


SHORT_7B = {**QWEN2_7B, "num_hidden_layers": 10, "max_window_layers": 10}
"""Qwen2.5-7B with fewer layers: dummy weights take a second a layer"""


def engine_arguments(plan) -> dict:
    """A plan's flags as arguments of LLM, with dummy weights."""
    flags = {flag.removeprefix("--").replace("-", "_"): values for flag, values in plan.flags("bfloat16").items()}
    flags.pop("speculative_config")  # engine.subspec sets it
    arguments = {n: json.loads(value) if value[0] in "0123456789{" else value for n, (value,) in flags.items()}
    return {**arguments, "load_format": "dummy", "enforce_eager": False}


def long_request() -> dict:
    params = {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True}
    return {"prompt": [i % 1000 + 10 for i in range(3000)], "params": params}


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("vram", [5.5 * GIB, 6.5 * GIB])
def test_planned_memory_is_the_real_one(checkpoint, vram):
    """Catches: an estimate more than 5% off, layers offloaded other than planned.

    vLLM fills what is left of its share with KV cache, so the cache's real size is exchanged for the planned one.
    Memory that only loading takes is given back by then.
    """
    import engine

    path = checkpoint(SHORT_7B)
    free, total = torch.cuda.mem_get_info()
    model = load_model(path)
    plan = make_plan(model, Run(context=default_context(model)), int(vram), total)
    job = {"model": path, "engine": engine_arguments(plan), "batches": [[long_request()]], "probe": "memory"}
    job["vram"] = plan.vram
    (answer,) = engine.subspec([job])
    probe = answer["probe"]
    assert tuple(probe["offloaded_layers"]) == plan.offloaded
    used = probe["used"] - (total - free)
    planned = plan.memory.total - plan.memory.loading
    real = used - probe["kv_cache"] + plan.memory.kv_cache
    print(f"planned {planned / GIB:.3f} GiB, real {real / GIB:.3f} GiB, used {used / GIB:.3f} of {vram / GIB:.2f} GiB")
    print(plan.placement, {name: round(size / MIB, 1) for name, size in vars(plan.memory).items()}, probe)
    assert used <= 1.05 * vram
    assert abs(real - planned) < 0.05 * planned


@pytest.mark.gpu
@pytest.mark.alone
def test_one_more_resident_layer_would_not_start(checkpoint):
    """Catches: a plan that leaves room for another layer."""
    import engine

    path = checkpoint(SHORT_7B)
    model = load_model(path)
    plan = make_plan(model, Run(context=default_context(model)), 6 * GIB, torch.cuda.mem_get_info()[1])
    layers = len(model.layers)

    def needed(placement):
        return offloaded_memory(model, plan.run, placement.offloaded(layers), placement.prefetch_step).total

    larger = [p for p in placements(layers) if len(p.offloaded(layers)) == len(plan.offloaded) - 1]
    placement = min(larger, key=needed)
    arguments = engine_arguments(dataclasses.replace(plan, placement=placement))
    arguments["gpu_memory_utilization"] = plan.gpu_memory_utilization
    job = {"model": path, "engine": arguments, "batches": [[long_request()]], "vram": plan.vram}
    with pytest.raises(RuntimeError) as refused:
        engine.subspec([job])
    print(plan.placement, placement)
    assert "KV cache" in str(refused.value) or "cache blocks" in str(refused.value)
