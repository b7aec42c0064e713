"""`vllm-subspec serve`: what of it is the user's, what is filled in, and what is said."""

from __future__ import annotations

import json
import os
from argparse import Namespace

import pytest
from published import QWEN2_7B, SMOLLM2, assert_refused
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_subspec.tools import serve
from vllm_subspec.tools.cli import main
from vllm_subspec.tools.plan.advise import make_plan
from vllm_subspec.tools.plan.gpu import Gpu
from vllm_subspec.tools.plan.host import EXACT, Host
from vllm_subspec.tools.plan.memory import CUDA_CONTEXT, CUDA_GRAPHS, Run
from vllm_subspec.tools.plan.model import model_from_config
from vllm_subspec.tools.plan.speed import GB, Bandwidth
from vllm_subspec.tools.sizes import GIB

SUBSPEC = {"method": "subspec"}
LINKS = Bandwidth(25 * GB, "measured"), Bandwidth(1000 * GB, "measured")
OURS = {"vram", "fastest"}
"""Options that vLLM does not have"""


@pytest.fixture
def served(monkeypatch, checkpoint):
    """Runs `vllm-subspec serve` on a machine with a GPU, and returns the options that the server would start with."""

    def run(
        *words: str, config: dict = QWEN2_7B, gpu: Gpu | None = Gpu(80 * GIB), cpu_build: bool = False
    ) -> Namespace:
        started = []
        monkeypatch.setattr(serve, "start", started.append)
        monkeypatch.setattr(serve, "is_cpu_build", lambda: cpu_build)
        monkeypatch.setattr(serve, "_in_a_process_of_its_own", lambda survey: (gpu, LINKS))
        monkeypatch.setattr(serve, "this_host", lambda: Host(256 * GIB, "MemAvailable", False))
        path = checkpoint(config)
        assert main(["serve", *(path if word == "MODEL" else word for word in words)]) == 0
        (options,) = started
        return options

    return run


@pytest.fixture(autouse=True)
def allocator_settings(monkeypatch):
    """None are set, and what is set is taken back."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")


def by_vllm(words: list[str]) -> dict:
    """What `vllm serve` makes of these words."""
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    options = vars(parser.parse_args(["serve", *words]))
    return {**options, "model": options["model_tag"] or options["model"], "model_tag": None}


def by_us(options: Namespace) -> dict:
    found = vars(options)
    return {name: found[name] for name in found.keys() - OURS} | {"model_tag": None}


def changed(options: Namespace, words: list[str]) -> dict:
    """What differs from `vllm serve` with these words."""
    theirs, found = by_vllm(words), by_us(options)
    assert theirs.keys() == found.keys()
    return {name: found[name] for name in found if found[name] != theirs[name]}


# --- the user's options


@pytest.mark.parametrize(
    "words",
    [
        ["m", "--max-model-len", "2k", "--max-num-seqs=3", "--max_num_batched_tokens", "1K"],
        ["m", "--config", "FILE"],
        ["m", "--config", "FILE", "--port", "81", "--max-model-len", "100"],
        ["--config", "MODEL_FILE", "--port", "81"],
        ["--model", "m", "--port", "81"],
        ["m", "--hf-overrides.max_position_embeddings", "100", "--hf-overrides", '{"a":{"b":1}}'],
        ["m", "-cc.mode", "0", "-cc.cudagraph_capture_sizes+", "1,2"],
        ["m", "-O3", "-tp", "1", "--no-enable-prefix-caching", "--max-logp", "7"],
        ["m", "--port", "80", "--port", "81", "--seed", "-1"],
        ["m", "--served-model-name", "a", "b", "--gpu-memory-utilization", "0.5", "--offload-params", "c", "d"],
        ["m", "--device-memory-utilization", "0.5", "--speculative_config.num_speculative_tokens", "288"],
    ],
)
def test_what_vllm_understands_means_the_same(served, tmp_path, words):
    """Catches: a file overridden, a spelling read otherwise or not at all, an option changed that nobody named."""
    (tmp_path / "options.yaml").write_text(
        "max-model-len: 2048\nport: 8100\nenforce-eager: true\nserved-model-name: [a, b]\n"
        "compilation-config:\n  mode: 0\nspeculative-config:\n  tree_width: 4\n"
    )
    (tmp_path / "model.yaml").write_text("model: m\nmax_model_len: 2k\n")
    files = {"FILE": str(tmp_path / "options.yaml"), "MODEL_FILE": str(tmp_path / "model.yaml")}
    words = [files.get(word, word) for word in words]
    options = served(*words, cpu_build=True)
    asked = by_vllm(words)["speculative_config"] or {}
    assert changed(options, words) == {"speculative_config": {**SUBSPEC, **asked}}


@pytest.mark.parametrize(
    "words,config",
    [
        (["--speculative-config.tree_width", "4"], {"tree_width": 4}),
        (["-sc.tree-width", "4"], {"tree-width": 4}),
        (["-sc", '{"tree_width": 4}'], {"tree_width": 4}),
        (["--speculative-config={}"], {}),
        (["--speculative_config.method", "subspec", "--speculative-config.tree_depth=8"], {**SUBSPEC, "tree_depth": 8}),
        (["--spec-tokens", "288"], {}),
    ],
)
def test_a_config_without_a_method_gets_ours(served, words, config):
    """Catches: a message about a method that the user never named; keys of the user's that are lost."""
    for machine in ({"cpu_build": True}, {"gpu": None}, {"gpu": Gpu(8 * GIB)}, {"gpu": Gpu(80 * GIB)}):
        assert served("MODEL", *words, **machine).speculative_config == {**SUBSPEC, **config}, machine


@pytest.mark.parametrize(
    "words",
    [
        ["m", "-sc", '{"method":"ngram","num_speculative_tokens":3}'],
        ["m", "--speculative-config.model", "draft"],
        ["m", "--spec-method", "ngram", "--spec-tokens", "3"],
        ["m", "--spec-model", "draft", "--cpu-offload-gb", "4"],
    ],
)
def test_other_methods_are_left_alone(served, words):
    """Catches: our method, or a plan for it, beside another one."""
    for machine in ({"cpu_build": True}, {"gpu": Gpu(8 * GIB)}):
        assert changed(served(*words, **machine), words) == {}


@pytest.mark.parametrize(
    "words",
    [
        ["--vram", "8GiB", "MODEL", "--port", "81"],
        ["MODEL", "--vram", "8GiB", "--port", "81"],
        ["MODEL", "--port", "81", "--vram", "8GiB"],
        ["--vram=8GiB", "MODEL", "--port", "81"],
        ["--vram", "8GiB", "--port", "81", "MODEL"],
        ["MODEL", "--port=81", "--vram=8GiB"],
        ["--vram", "20GiB", "MODEL", "--vram", "8GiB", "--port", "81"],
        ["--config", "FILE", "--port", "81", "MODEL"],
    ],
)
def test_the_plan_is_applied_wherever_vram_stands(served, tmp_path, capsys, words):
    """Catches: --vram swallowed with a neighbour, options that must follow the model; flags other than the plan's."""
    (tmp_path / "options.yaml").write_text("vram: 8GiB\n")
    options = served(*(str(tmp_path / "options.yaml") if word == "FILE" else word for word in words))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "layers resident" in lines[0]
    plan = make_plan(model_from_config(QWEN2_7B, "m"), Run(), 8 * GIB, 80 * GIB)
    planned = [word for flag, values in plan.flags("bfloat16").items() for word in (flag, *values)]
    assert changed(options, [options.model, "--port", "81", *planned]) == {}
    assert options.gpu_memory_utilization == plan.gpu_memory_utilization and options.offload_group_size > 0


def test_the_users_options_are_kept_and_planned_with(served):
    """Catches: an option overridden; a plan for another context, tree or chunk than what runs."""
    spec = '{"method":"subspec","tree_width":16,"tree-depth":32}'
    own = ["--max_model_len", "8K", "--speculative-config", spec, "--gpu-memory-utilization=0.5"]
    options = served("MODEL", *own, "--vram", "9")
    run = Run(context=8192, tree_width=16, tree_depth=32, chunk=768)
    plan = make_plan(model_from_config(QWEN2_7B, "m"), run, 9 * GIB, 80 * GIB)
    assert (options.gpu_memory_utilization, options.max_model_len) == (0.5, 8192)
    assert options.speculative_config == json.loads(spec) and options.max_num_batched_tokens == 768
    assert options.offload_group_size == plan.placement.group_size
    assert options.compilation_config.mode == 0 and options.max_num_seqs == 1

    options = served("MODEL", "--vram", "9", "-cc.cudagraph_capture_sizes+", "1", "--max-model-len", "auto")
    assert options.max_model_len == -1
    assert (
        changed(options, [options.model, "-cc.cudagraph_capture_sizes+", "1"])
        .keys()
        .isdisjoint({"compilation_config", "cudagraph_capture_sizes"})
    )
    assert served("MODEL", "--vram", "9", "-O2").compilation_config == served("MODEL", "-O2").compilation_config
    assert served("MODEL", "--vram", "9", gpu=Gpu(12 * GIB, bfloat16=False)).dtype == "float16"


def test_contexts_that_overrides_allow(served, capsys, monkeypatch):
    """Catches: a context refused that vLLM would take; one allowed that it would not."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    ask = ["MODEL", "--vram", "12", "--max-model-len", "40K"]
    for overrides in ({"max_position_embeddings": 131072}, {"rope_parameters": yarn}, {"rope_scaling": yarn}):
        assert served(*ask, "--hf-overrides", json.dumps(overrides)).max_model_len == 40960
    assert served(*ask, "--hf-overrides.max_position_embeddings", "65536").max_model_len == 40960
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert served(*ask).max_model_len == 40960
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN")
    with pytest.raises(AssertionError):
        served(*ask)
    assert "32768 positions" in capsys.readouterr().err


# --- what is decided


def test_a_model_that_does_not_fit_gets_the_plan_for_what_is_free(served, capsys):
    """Catches: a GPU planned for as if others did not use it; a share of it that the user set, exceeded."""
    model = model_from_config(QWEN2_7B, "m")
    for gpu, words, vram in (
        (Gpu(8 * GIB), [], 8 * GIB),
        (Gpu(9 * GIB, others=GIB), [], 8 * GIB),
        (Gpu(16 * GIB), ["--gpu-memory-utilization", "0.5"], 8 * GIB + CUDA_CONTEXT + CUDA_GRAPHS),
    ):
        options = served("MODEL", *words, gpu=gpu)
        plan = make_plan(model, Run(), vram, gpu.total)
        planned = [word for flag, values in plan.flags("bfloat16").items() for word in (flag, *values)]
        assert changed(options, [options.model, *planned, *words]) == {}
        decided, expected, host = capsys.readouterr().out.splitlines()
        assert "layers resident" in decided
        assert "tokens/s" in expected and "first token" in expected
        assert "CPU memory" in host and "256.00 GiB available" in host


def test_what_is_expected_is_what_plan_says(served, capsys):
    """Catches: speeds and times other than those of the plan that is started."""
    served("MODEL", gpu=Gpu(12 * GIB))
    _, expected, host = capsys.readouterr().out.splitlines()
    path = served("MODEL", gpu=Gpu(12 * GIB)).model
    capsys.readouterr()
    main(["plan", path, "--vram", "12", "--json", "--pcie", "25", "--bandwidth", "1000", "--tau", "8", "20"])
    plan = json.loads(capsys.readouterr().out)
    slow, fast = (e["tokens_per_second"] for e in plan["expected"])
    assert f"Expect {slow:.0f} to {fast:.0f} tokens/s" in expected
    assert f"{1 / plan['t_target']:.1f} without" in expected and f"{plan['t_first']:.1f} s to the first" in expected
    assert all(f"{plan['cpu_memory'][kind] / GIB:.2f} GiB" in host for kind in ("loading", "serving"))


def test_a_model_that_fits_is_served_plain(served, capsys):
    """Catches: a draft that only costs time; limits that plain vLLM would not need, or none where it would not start."""
    options = served("MODEL")
    assert changed(options, [options.model]) == {}
    out = capsys.readouterr().out
    assert "all 28 layers fit" in out and "without speculation" in out
    assert os.environ["PYTORCH_ALLOC_CONF"] == ""

    options = served("MODEL", gpu=Gpu(18 * GIB))  # with 4096 tokens, but not with 32768 and vLLM's batch
    assert (options.max_model_len, options.max_num_seqs, options.speculative_config) == (4096, 1, None)
    assert "one request of at most 4096 tokens" in capsys.readouterr().out
    options = served("MODEL", "--max-num-seqs", "4", gpu=Gpu(18 * GIB))
    assert (options.max_model_len, options.max_num_seqs) == (4096, 4)

    options = served("MODEL", "--vram", "8GiB", config=SMOLLM2)
    assert (options.speculative_config, options.offload_group_size, options.max_num_seqs) == (None, 0, 1)


def test_who_asks_for_it_speculates_although_it_fits(served, capsys):
    """Catches: a speculative config or offload flags of the user's dropped or planned over."""
    words = ["-sc", '{"tree_width":4}']
    options = served("MODEL", *words)
    assert changed(options, [options.model, *words]) == {"speculative_config": {**SUBSPEC, "tree_width": 4}}
    assert "all 28 layers fit" in capsys.readouterr().out
    for words in (["--offload-group-size", "2"], ["--cpu-offload-gb", "4"]):
        for gpu in (Gpu(8 * GIB), Gpu(80 * GIB)):
            options = served("MODEL", *words, gpu=gpu)
            assert changed(options, [options.model, *words]) == {"speculative_config": SUBSPEC}
            assert capsys.readouterr().out.count("\n") == 1


def test_without_a_gpu_the_method_is_on(served, capsys):
    """Catches: a plan where there is nothing to plan; a user who takes a CPU's speed for what to expect."""
    for machine in ({"cpu_build": True}, {"gpu": None}):
        words = ["MODEL", "--port", "81"]
        options = served(*words, **machine)
        assert changed(options, [options.model, *words[1:]]) == {"speculative_config": SUBSPEC}
        out = capsys.readouterr().out
        assert "nothing is offloaded" in out and out.count("\n") == 1


def test_the_fastest_plan(served, capsys):
    """Catches: --fastest without effect, substitutes where the user said which."""
    for words in (["--vram", "12", "--fastest", "MODEL"], ["MODEL", "--fastest"]):
        options = served(*words, gpu=Gpu(12 * GIB))
        assert options.speculative_config == {**SUBSPEC, "substitute_layers": "all"}
    capsys.readouterr()
    for own in ({"method": "subspec", "substitute_layers": "offloaded"}, {"method": "subspec", "tree_width": 5}):
        options = served("MODEL", "--fastest", "--vram", "12", "-sc", json.dumps(own))
        assert options.speculative_config == own
        assert "substitutes for all" not in capsys.readouterr().out


def test_torch_pins_no_more_than_asked_where_something_is_offloaded(served, monkeypatch):
    """Catches: twice the CPU memory taken; a setting of the user's replaced; one set that this torch does not know."""
    for words in (["MODEL"], ["MODEL", "--cpu-offload-gb", "4"]):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
        served(*words, gpu=Gpu(8 * GIB))
        assert os.environ["PYTORCH_ALLOC_CONF"] == EXACT
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setattr("vllm_subspec.tools.plan.host.version", lambda name: "2.12.1")
    served("MODEL", gpu=Gpu(8 * GIB))
    assert os.environ["PYTORCH_ALLOC_CONF"] == ""


def test_settings_of_the_users_own_stay(served, monkeypatch, capsys):
    """Catches: an allocator configuration of the user's replaced; memory planned as if it had been."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    served("MODEL", gpu=Gpu(8 * GIB))
    assert os.environ["PYTORCH_ALLOC_CONF"] == ""
    rounded = capsys.readouterr().out.splitlines()[2]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", EXACT)
    served("MODEL", gpu=Gpu(8 * GIB))
    assert capsys.readouterr().out.splitlines()[2] != rounded


def test_the_gpu_is_looked_at_from_outside():
    """Catches: a CUDA context in the server's process, for as long as it runs."""
    assert serve._in_a_process_of_its_own(os.getpid) != os.getpid()


# --- refusals


@pytest.mark.parametrize(
    "words,expected",
    [
        (["--vram"], ["--vram", "expected one argument"]),
        (["--vram", "6GiB"], ["smallest VRAM"]),
        (["--vram", "6GiB", "--fastest"], ["smallest VRAM"]),
        (["--vram", "-8GiB"], ["--vram", "above zero"]),
        (["--vram", "8", "--max-model-len", "4x"], ["--max-model-len", "'4x'"]),
        (["--vram", "8", "--max-model-len", "0"], ["--max-model-len", "above zero"]),
        (["--vram", "8", "--max-num-batched-tokens", "128"], ["289", "128"]),
        (["--vram", "8", "--dtype", "fp8"], ["--dtype", "'fp8'"]),
        (["--vram", "8", "--speculative-config", "{"], ["--speculative-config", "JSON"]),
        (["--vram", "8", "--speculative-config", "[1]"], ["--speculative-config", "JSON"]),
        (["--vram", "8", "--speculative-config", '{"method":"ngram"}'], ["subspec"]),
        (["--vram", "8", "--speculative-config.tree_width", "x"], ["tree_width"]),
        (["--vram", "24", "--speculative-config", '{"method":"subspec"}'], ["remove --speculative-config"]),
        (["--vram", "9", "--cpu-offload-gb", "10"], ["remove --cpu-offload-gb"]),
        (["--vram", "40", "--offload-group-size", "1"], ["remove --offload-group-size"]),
        (["--fastest", "--offload-group-size", "1"], ["remove --offload-group-size"]),
        (["--vram", "8", "--config", "absent.yaml"], ["absent.yaml"]),
        (["--vram", "8", "--config=absent.yaml"], ["write --config FILE"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
)
def test_refusals_take_one_sentence(monkeypatch, checkpoint, capsys, words, expected):
    """Catches: a server started with a plan that cannot be, a traceback."""
    monkeypatch.setattr(serve, "start", lambda _: pytest.fail("started"))
    monkeypatch.setattr(serve, "is_cpu_build", lambda: False)
    monkeypatch.setattr(serve, "_in_a_process_of_its_own", lambda survey: (Gpu(80 * GIB), LINKS))
    assert_refused(capsys, ["serve", checkpoint(), *words], expected)


def test_files_that_are_none(monkeypatch, tmp_path, capsys):
    """Catches: a traceback of the YAML reader."""
    for text in ("", "- 1\n", "a: [\n"):
        (tmp_path / "options.yaml").write_text(text)
        assert_refused(capsys, ["serve", "m", "--config", str(tmp_path / "options.yaml")], ["--config"])
    (tmp_path / "options.yaml").write_text("port: 81\n")
    for words in ([], ["--config", str(tmp_path / "options.yaml")], ["--vram", "8"]):
        assert_refused(capsys, ["serve", *words], ["no model is given"])


def test_plans_on_a_cpu_build_are_refused(checkpoint, capsys, monkeypatch):
    """Catches: flags that vLLM's CPU build does not understand."""
    monkeypatch.setattr(serve, "start", lambda _: pytest.fail("started"))
    monkeypatch.setattr(serve, "is_cpu_build", lambda: True)
    for words in (["--vram", "8"], ["--fastest"]):
        assert_refused(capsys, ["serve", checkpoint(), *words], ["--vram", "CPU build"])


@pytest.mark.parametrize(
    "host,words",
    [
        (Host(16 * GIB, "MemAvailable", False), ["CPU memory", "16.00 GiB", "MemAvailable", "missing"]),
        (Host(16 * GIB, "the control group's limit", False), ["control group"]),
        (Host(256 * GIB, "MemAvailable", True), ["VLLM_WSL2_ENABLE_PIN_MEMORY"]),
    ],
)
def test_too_little_cpu_memory_is_refused_before_loading(checkpoint, capsys, monkeypatch, host, words):
    """Catches: a machine that runs out of memory, or cannot pin any, after minutes of loading."""
    monkeypatch.setattr(serve, "start", lambda _: pytest.fail("started"))
    monkeypatch.setattr(serve, "is_cpu_build", lambda: False)
    monkeypatch.setattr(serve, "_in_a_process_of_its_own", lambda survey: (Gpu(8 * GIB), LINKS))
    monkeypatch.setattr(serve, "this_host", lambda: host)
    for more in ([], ["--vram", "8192MiB"]):
        assert_refused(capsys, ["serve", checkpoint(), *more], words)


def test_version_names_both(capsys):
    """Catches: no way to tell what is installed."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    from vllm_subspec import __version__
    from vllm_subspec.versions import vllm_build

    out = capsys.readouterr().out
    assert ended.value.code == 0 and __version__ in out and " ".join(vllm_build()) in out
