"""The speculative config and what is refused at the start: one sentence that names the option and the remedy."""

from __future__ import annotations

import json

import pytest
import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.make("llama", tmp_path_factory.mktemp("config") / "llama")


@pytest.fixture
def configure(checkpoint, monkeypatch):
    """The engine configuration for a speculative config and engine arguments, as `LLM` and `vllm serve` make it."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_subspec.engine.plugin import register

    register()

    def make(spec: dict | None, **engine):
        arguments = dict(model=checkpoint, skip_tokenizer_init=True, max_model_len=400, dtype="float32")
        return EngineArgs(**{**arguments, **engine}, speculative_config=spec).create_engine_config()

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    yield make
    make(None)  # leaves the environment as an engine without the method finds it


def message(error) -> str:
    """What the user reads: pydantic wraps the sentence for some errors."""
    text = str(error.value)
    return " ".join(text.split())


def test_defaults_and_derived_fields(configure):
    """Catches: a default other than the documented one, num_speculative_tokens or the batch-size schedule not set."""
    c = configure({"method": "subspec"}).speculative_config
    assert (c.tree_width, c.tree_depth, c.draft_temperature) == (6, 48, 0.2)
    assert (c.substitute_bits, c.substitute_group_size, c.substitute_layers) == (4, 64, "auto")
    assert c.share_kv and c.async_transfer
    assert c.num_speculative_tokens == 288
    assert c.num_speculative_tokens_per_batch_size == [(1, 1, 288), (2, 2, 0)]


def test_fields_may_be_given_with_dashes_and_a_consistent_count(configure):
    """Catches: vLLM's dash spelling lost, a right num_speculative_tokens refused."""
    c = configure({"method": "subspec", "tree-width": 2, "tree_depth": 5, "num_speculative_tokens": 10})
    assert c.speculative_config.num_speculative_tokens == 10


@pytest.mark.parametrize(
    "spec,engine,words",
    [
        ({"tree_width": 2, "tree_depth": 5, "num_speculative_tokens": 11}, {}, ["num_speculative_tokens", "leave"]),
        ({"treewidth": 3}, {}, ["treewidth", "remove"]),
        ({"model": "x"}, {}, ["model", "remove"]),
        ({"prompt_lookup_max": 3}, {}, ["prompt_lookup_max", "remove"]),
        ({"tree_width": 0}, {}, ["tree_width"]),
        ({"tree_width": 65}, {}, ["tree_width"]),
        ({"tree_depth": 129}, {}, ["tree_depth"]),
        ({"draft_temperature": 0}, {}, ["draft_temperature"]),
        ({"substitute_bits": 8}, {}, ["substitute_bits"]),
        ({"substitute_layers": "some"}, {}, ["substitute_layers"]),
        ({"tree_width": 64, "tree_depth": 8}, {"max_num_batched_tokens": 512, "max_model_len": 1024},
         ["--max-num-batched-tokens", "513"]),
        ({}, {"max_num_batched_tokens": 64, "max_model_len": 256}, ["--max-num-batched-tokens", "254"]),
        ({}, {"tensor_parallel_size": 2}, ["--tensor-parallel-size", "1"]),
        ({}, {"kv_cache_dtype": "fp8"}, ["--kv-cache-dtype", "auto"]),
        ({}, {"enable_lora": True}, ["LoRA", "--enable-lora"]),
        ({}, {"worker_cls": "a.B"}, ["--worker-cls", "remove"]),
        ({}, {"quantization": "fp8", "dtype": "bfloat16"}, ["quantized", "--quantization"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_sentence(configure, spec, engine, words):
    """Catches: an option silently ignored, an error that does not name it, a crash later instead."""
    with pytest.raises(Exception) as error:
        configure({"method": "subspec", **spec}, **engine)
    text = message(error)
    assert all(word in text for word in words), text
    assert "Traceback" not in text


LONG = {"max_model_len": 4096, "hf_overrides": {"max_position_embeddings": 4096}}


@pytest.mark.parametrize(
    "spec,engine,nodes,tokens",
    [
        ({}, {"max_model_len": 256, "max_num_seqs": 1}, 253, 256),
        ({"num_speculative_tokens": 288}, {"max_model_len": 64, "max_num_seqs": 1}, 61, 64),
        ({}, {"max_model_len": 2, "max_num_seqs": 1}, 1, 2),
        ({}, {"max_model_len": 256, "max_num_batched_tokens": 256}, 253, 256),
        ({"tree_width": 2, "tree_depth": 3}, {"max_model_len": 64, "max_num_seqs": 1}, 6, 64),
        ({"tree_width": 64, "tree_depth": 33}, LONG, 2112, 2113),  # vLLM's own is 2048
        ({"tree_width": 64, "tree_depth": 31}, LONG, 1984, 2048),
    ],
)
def test_a_step_that_the_user_did_not_size_has_room_for_the_trees_there_can_be(configure, spec, engine, nodes, tokens):
    """Catches: a start refused for an option that vLLM derived; a step longer than the model, which vLLM's dummy runs
    and models with learned positions do not survive."""
    c = configure({"method": "subspec", **spec}, **engine)
    scheduler = c.scheduler_config
    assert (c.speculative_config.num_speculative_tokens, scheduler.max_num_batched_tokens) == (nodes, tokens)
    assert scheduler.max_num_scheduled_tokens == tokens
    if "max_num_batched_tokens" not in engine:
        assert configure(None, **engine).scheduler_config.max_num_batched_tokens == min(tokens, 2048)


def test_a_tree_is_cut_to_what_fits():
    """Catches: a tree of more nodes than there are, of none, or smaller than it need be."""
    from vllm_subspec.round.limits import fitting_tree

    for width in range(1, 9):
        for depth in range(1, 9):
            for nodes in range(1, 70):
                w, d = fitting_tree(width, depth, nodes)
                trees = [(i, j) for i in range(1, width + 1) for j in range(1, depth + 1) if i * j <= nodes]
                assert (w, d) == max(trees)  # the widest, then the deepest


def test_a_sweep_may_ask_for_trees_that_no_request_has_room_for():
    """Catches: an engine that starts with such a tree and then refuses the same one to a benchmark, or drafts it."""
    import torch

    from vllm_subspec.round.draft import SubSpecSpeculator

    speculator = object.__new__(SubSpecSpeculator)
    speculator.__dict__.update(max_nodes=253, max_keys=256, device=torch.device("cpu"))
    for asked, made in {(6, 48): (6, 42), (7, 40): (7, 36), (11, 23): (11, 23), (64, 128): (64, 3)}.items():
        speculator.set_tree(*asked)
        assert (speculator.tree_width, speculator.tree_depth, len(speculator.tree)) == (*made, 1 + made[0] * made[1])
    speculator.max_nodes = 18
    for width, depth in ((6, 48), (5, 4), (0, 1)):
        with pytest.raises(ValueError, match="18 nodes"):
            speculator.set_tree(width, depth)


def test_the_old_runner_forced_by_the_environment_is_refused(configure, monkeypatch):
    """Catches: VLLM_USE_V2_MODEL_RUNNER=0 overridden silently."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="unset VLLM_USE_V2_MODEL_RUNNER"):
        configure({"method": "subspec"})


def test_another_method_reaches_vllm_untouched(configure):
    """Catches: the wrapper changing or refusing what is not ours."""
    from vllm.config import SpeculativeConfig

    c = configure({"method": "ngram", "num_speculative_tokens": 3}).speculative_config
    assert type(c) is SpeculativeConfig and c.method == "ngram"


@pytest.mark.parametrize(
    "spec,hinted",
    [({"method": "subspce", "tree_width": 3}, True), ({"method": "SubSpec"}, True), ({"method": "sub-spec"}, True),
     ({"method": "eagel", "model": "x"}, False), ({"method": 3}, False)],
)  # fmt: skip
def test_a_mistyped_method_is_told_of_ours(configure, monkeypatch, spec, hinted):
    """Catches: a list of methods without the one that was meant; any other change to vLLM's error."""
    from pydantic import ValidationError

    from vllm_subspec.engine import config

    with pytest.raises(ValidationError) as error:
        configure(spec)
    assert "Input should be 'subspec'" in str(error.value) and "'eagle3'" in str(error.value)
    assert ("did you mean subspec?" in str(error.value)) is hinted
    monkeypatch.setattr(config, "with_subspec", lambda error: error)
    with pytest.raises(ValidationError) as vllms:
        configure(spec)
    without = lambda error: [{k: v for k, v in line.items() if k not in ("msg", "ctx")} for line in error.errors()]  # noqa: E731
    assert without(error.value) == without(vllms.value) and error.value.title == vllms.value.title


def test_vllms_other_errors_are_left_alone(configure):
    """Catches: an error about another option of another method that changes."""
    with pytest.raises(Exception) as error:
        configure({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1, "prompt_lookup_min": 2})
    assert "prompt_lookup_min" in str(error.value) and "subspec" not in str(error.value)


def test_the_environment_is_restored_for_the_next_engine(configure, monkeypatch):
    """Catches: plain engines after one with subspec running on the interpreted runner; marks of a refused one."""
    import os

    from vllm_subspec.cpu.platform import MARK, is_cpu_build

    if not is_cpu_build():
        pytest.skip("CUDA builds need no marks")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    configure({"method": "subspec"})
    assert os.environ[MARK] == "1"
    configure(None)
    assert MARK not in os.environ and os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    with pytest.raises(Exception):
        configure({"method": "subspec"}, max_num_batched_tokens=256)
    assert MARK not in os.environ


def test_the_config_survives_the_way_to_another_process(configure):
    """Catches: fields lost when vLLM pickles the configuration for its engine process."""
    import pickle

    c = pickle.loads(pickle.dumps(configure({"method": "subspec", "tree_depth": 7}).speculative_config))
    assert (type(c).__name__, c.tree_depth, c.num_speculative_tokens) == ("SubSpecConfig", 7, 42)
    json.dumps({"repr": repr(c)})


def test_compiled_graphs_are_kept_apart_where_they_differ(configure, monkeypatch):
    """Catches: a start that takes another method's or version's compiled target, without or with other operators than
    its own; one that compiles anew for an option of the draft."""
    from dataclasses import fields

    from vllm.config import SpeculativeConfig

    from vllm_subspec.engine import config

    key = lambda **options: configure({"method": "subspec", **options}).speculative_config.compute_hash()  # noqa: E731
    ours = configure({"method": "subspec"}).speculative_config
    other = object.__new__(SpeculativeConfig)  # a draft that is the same model
    other.__dict__.update({f.name: getattr(ours, f.name) for f in fields(SpeculativeConfig)}, method="draft_model")
    assert ours.compute_hash() != other.compute_hash()
    assert ours.compute_hash() == key(
        tree_width=2, tree_depth=3, draft_temperature=1.0, substitute_group_size=32, substitute_layers="all",
        share_kv=False, async_transfer=False, confidence_threshold=0.0,
    )  # fmt: skip
    of_this_version = key()
    monkeypatch.setattr(config, "__version__", "99")
    assert key() != of_this_version


def test_vllm_is_told_of_our_variable(configure, monkeypatch):
    """Catches: the way out that our error names refused by --fail-on-environ-validation, or taken for a typing error."""
    from vllm import envs

    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    monkeypatch.setenv("VLLM_SUBSPEC_ALLOW_CHANGED_VLLM", "1")
    with pytest.raises(ValueError, match="VLLM_SUBSPEC_ALLOW_CHANGED_VLLM"):
        configure(None, fail_on_environ_validation=True)
    configure({"method": "subspec"}, fail_on_environ_validation=True)


def test_a_start_warns_of_nothing_that_does_not_apply(configure, monkeypatch):
    """Catches: advice to draft less or to give more tokens a step, a warning of asynchronous scheduling that nobody asked
    for, or of a custom scheduler class."""
    from vllm.config import scheduler
    from vllm.config import vllm as module

    from vllm_subspec.engine.scheduler import SubSpecScheduler

    said = []
    for logger in (module.logger, scheduler.logger):
        for name in ("warning", "warning_once"):
            monkeypatch.setattr(logger, name, lambda text, *values, **more: said.append(text % values))
    made, warned = {}, {}
    for method, spec in (("plain", None), ("subspec", {"method": "subspec"})):
        config = configure(spec, max_num_batched_tokens=512)
        config.__post_init__()  # as in the engine's process
        made[method], warned[method] = config.scheduler_config.get_scheduler_cls(), set(said)
        assert config.scheduler_config.max_num_scheduled_tokens == (512 if spec else None)
        said.clear()
    assert warned["subspec"] <= warned["plain"]
    assert made["subspec"] is SubSpecScheduler and made["plain"] is not SubSpecScheduler
