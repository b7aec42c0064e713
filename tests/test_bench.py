"""The bench: loaders, figures, settings, reports; engines are made up except in the last test."""

from __future__ import annotations

import csv
import functools
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

from vllm_subspec.tools.bench import command, datasets, draft_pass, measure, methods, report, run, settings, tau, tune
from vllm_subspec.tools.bench.engine import one_sentence
from vllm_subspec.tools.bench.process import environment, run_engine
from vllm_subspec.tools.bench.progress import Clock
from vllm_subspec.tools.cli import main
from vllm_subspec.tools.prompts import PROMPTS

ROOT = Path(__file__).resolve().parent.parent

# --- datasets


def jsonl(path: Path, *rows: dict) -> Path:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def gpqa(path: Path) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["Record ID", "Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))])
        writer.writerow(["r1", 'Which, of\nthese "two"?', "right", "wrong1", "wrong2", "wrong3"])
    return path


def parquet(path: Path, *rows: dict) -> Path:
    import pyarrow
    from pyarrow import parquet as files

    files.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


PUBLISHED = {
    "mt_bench": lambda d: jsonl(
        d / "question.jsonl", {"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]}
    ),
    "humaneval": lambda d: jsonl(
        d / "HumanEval.jsonl.gz", {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": ""}
    ),
    # A line separator inside a string is no end of line.
    "gsm8k": lambda d: jsonl(d / "test.jsonl", {"question": "How\u2028many?", "answer": "#### 3"}),
    "alpaca": lambda d: (
        d / "a.json",
        (d / "a.json").write_text('[{"instruction": "Sort.", "input": "2 1", "output": ""}]'),
    )[0],
    "cnn_dm": lambda d: parquet(d / "test.parquet", {"article": "News.", "highlights": "N.", "id": "1"}),
    "aime2024": lambda d: parquet(d / "aime.parquet", {"ID": "2024-I-1", "Problem": "Find x.", "Answer": 204}),
    "math500": lambda d: jsonl(d / "test.jsonl", {"problem": "Find y.", "solution": "", "answer": "2", "level": 1}),
    "gpqa_diamond": lambda d: gpqa(d / "gpqa_diamond.csv"),
    "livecodebench": lambda d: jsonl(
        d / "test.jsonl",
        {"question_content": "Add.", "starter_code": "class S:"},
        {"question_content": "B", "starter_code": ""},
    ),
}
EXPECTED = {
    "mt_bench": ["One?", "Two?"], "humaneval": ["def f():"], "gsm8k": ["How\u2028many?"], "alpaca": ["Sort.\n\n2 1"],
    "cnn_dm": ["News."], "aime2024": ["Find x."], "math500": ["Find y."], "gpqa_diamond": ['Which, of\nthese "two"?'],
    "livecodebench": ["class S:"],
}  # fmt: skip


@pytest.mark.parametrize("name", datasets.DATASETS)
def test_published_formats(name, tmp_path):
    """Catches: a column under another name, a format not read, a template that loses the task, turns merged."""
    prompts = datasets.load(name, str(PUBLISHED[name](tmp_path)))
    assert len(prompts[0]) == len(EXPECTED[name])
    assert all(part in turn for part, turn in zip(EXPECTED[name], prompts[0]))


def test_templates(tmp_path):
    """Catches: options missing or always in one place, starter code where there is none."""
    (text,) = datasets.load("gpqa_diamond", str(gpqa(tmp_path / "g.csv")), seed=1)[0]
    assert all(f"{letter}) " in text for letter in "ABCD") and all(f"wrong{i}" in text for i in (1, 2, 3))
    places = {datasets.load("gpqa_diamond", str(tmp_path / "g.csv"), seed=s)[0][0].index(") right") for s in range(9)}
    assert len(places) > 1
    with_code, without = datasets.load("livecodebench", str(PUBLISHED["livecodebench"](tmp_path)))
    assert "starter code" in with_code[0] and "stdin" in without[0] and "None" not in without[0]


def test_own_prompts_are_there_and_chosen_by_seed():
    """Catches: a kind without prompts, a second turn lost, a choice that no seed repeats."""
    for kind in datasets.OWN:
        prompts = datasets.load(kind)
        assert len(prompts) >= 8 and all(len(turns) == (2 if kind == "chat" else 1) for turns in prompts)
        assert all(isinstance(turn, str) and len(turn) > 20 for turns in prompts for turn in turns)
        assert datasets.load(kind, samples=3, seed=5) == datasets.load(kind, samples=3, seed=5)
        assert len({str(datasets.load(kind, samples=3, seed=seed)) for seed in range(8)}) > 1
    assert datasets.load("six", samples=6) == [[prompt] for prompt in PROMPTS]


# --- settings

BAD = [
    (["--methods", "warp"], "no method 'warp'"), (["--benchmarks", "gsm9k"], "no benchmark 'gsm9k'"),
    (["--benchmarks", "gsm8k"], "needs its file"), (["--benchmarks", "gsm8k=/none.jsonl"], "no file /none.jsonl"),
    (["--benchmarks", "chat=x"], "takes no file"), (["--methods", "draft_model"], "--draft"),
    (["--methods", "draft_model", "--draft", "/nowhere"], "/nowhere"), (["--model", "/"], "no config.json"),
    (["--model", "nowhere"], "no model directory"), (["--config", "none.yaml"], "no file none.yaml"),
    (["--engine", "dtype"], "key=value"), (["--sweep", "colour=1"], "'colour'"),
    (["--sweep", "depth=x"], "whole numbers"), (["--sweep", "tree=6"], "WIDTHxDEPTH"),
    (["--sweep", "tree=6x0"], "above zero"), (["--sweep", "bits=4"], "'bits'"),
    (["--sweep", "tree=6x8", "depth=4"], "either tree"),
    (["--methods", "vanilla", "--sweep", "depth=8"], "--methods"), (["--samples", "0"], "samples"),
    (["--vram", "8XB"], "8GiB"), (["--temperature", "-1"], "temperature"), (["--redo", "pyproject.toml"], "no result"),
    (["--methods", "vanilla", "vanilla"], "twice"), (["--plain-tokens", "1"], "plain_tokens"),
    (["--benchmarks", "six=x"], "takes no file"),
    (["--benchmarks", "chat", "--out", "pyproject.toml"], "pyproject.toml"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, said", BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_bad_input_is_one_sentence(arguments, said, smollm2, tmp_path, monkeypatch, capsys):
    """Catches: a traceback, a wrong value found only when engines run, an error that does not name the culprit."""
    monkeypatch.chdir(ROOT)
    if "--model" not in arguments:
        arguments = [*arguments, "--model", smollm2]
    assert main(["bench", "--out", str(tmp_path / "out"), *arguments]) != 0
    printed = capsys.readouterr().err
    assert said in printed and len(printed.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_vram_is_refused_on_cpu(smollm2, monkeypatch, capsys):
    """Catches: a limit that is silently without effect."""
    monkeypatch.setattr("vllm_subspec.cpu.platform.is_cpu_build", lambda: True)
    assert main(["bench", "--model", smollm2, "--vram", "8GiB"]) != 0
    assert "CPU build" in capsys.readouterr().err


def parsed(*arguments: str):
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def test_flags_override_the_yaml_and_the_yaml_the_defaults():
    """Catches: a default that beats the file, a mapping replaced instead of merged, values left as text."""
    text = yaml.dump({"samples": 3, "repeats": 2, "engine": {"dtype": "float32", "enforce_eager": True}, "draft": None})
    given = parsed("--samples", "5", "--engine", "dtype=bfloat16", "offload_group_size=1", "--sweep", "depth=8,16")
    made = command.settings_from(given, text)
    assert (made.samples, made.repeats, made.seed) == (5, 2, settings.Settings().seed)
    assert made.engine == {"dtype": "bfloat16", "enforce_eager": True, "offload_group_size": 1}
    assert made.sweep == {"depth": [8, 16]} and made.temperature == [0.0]


BAD_YAML = [("sample: 3", "'sample'"), ("[1]", "mapping"), ("a: [", "parse"), ("samples: many", "samples"),
            ("engine: 3", "engine"), ("temperature: hot", "list")]  # fmt: skip


@pytest.mark.parametrize("text, said", BAD_YAML)
def test_bad_yaml(text, said):
    """Catches: an unknown key or a value of another kind that passes."""
    with pytest.raises(ValueError, match=said):
        settings.resolve(text, {})


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_example_runs_resolve(path):
    """Catches: an example with a key that does not exist."""
    made = settings.resolve(path.read_text(), {})
    assert methods.plan(made)


# --- methods


def test_drafts_of_a_sweep_share_an_engine_configured_for_the_largest():
    """Catches: an engine too small for one of its trees, one engine a tree, a swept option that is not set, or that
    stays for the variants after."""
    sweep = {"depth": [8, 16], "draft_temperature": [0.5, 1.0], "group_size": [32, 64]}
    made = settings.resolve(None, {"sweep": sweep, "subspec": {"tree_width": 4, "confidence_threshold": 0.3}})
    vanilla, first, second = methods.plan(made)
    assert vanilla.speculative_config is None
    assert first.speculative_config == {
        "method": "subspec",
        "tree_width": 4,
        "tree_depth": 16,
        "draft_temperature": 0.5,
        "confidence_threshold": 0.3,
        "substitute_group_size": 32,
    }
    assert second.speculative_config["substitute_group_size"] == 64
    assert [v.tree for v in first.variants] == [(4, 8), (4, 8), (4, 16), (4, 16)]
    assert [v.draft["draft_temperature"] for v in first.variants] == [0.5, 1.0, 0.5, 1.0]
    assert all(v.draft["confidence_threshold"] == 0.3 for v in first.variants)
    assert first.variants[2].name == "subspec depth=16 draft_temperature=0.5 group_size=32"


@pytest.mark.parametrize(
    "given, first_only",
    [({"sweep": {"tree": ["6x8", "6x48"]}}, [True, False]), ({"sweep": {"depth": [8, 16]}}, [False, False]),
     ({"sweep": {"width": [4, 6]}, "subspec": {"tree_width": 4}}, [False, True]), ({}, [False])],
)  # fmt: skip
def test_only_the_method_itself_is_measured_at_every_temperature(given, first_only):
    """Catches: a sweep that takes as long again for each temperature; the method left out at one."""
    made = settings.resolve(None, {"temperature": [0.0, 0.6], "methods": ["subspec"], **given})
    (engine,) = methods.plan(made)
    assert [v.first_only for v in engine.variants] == first_only
    steps = run._steps([engine], [{"prompts": [["a", "b"], ["c"]]}], made)
    turns = 3 * made.repeats
    assert [steps["answer", v.name] for v in engine.variants] == [turns if f else 2 * turns for f in first_only]


def test_vllms_own_methods():
    """Catches: a config without the draft, or without what ngram must have."""
    made = settings.resolve(None, {"methods": ["draft_model", "eagle3", "ngram"], "draft": "a/b", "draft_tokens": 7})
    draft, eagle, ngram = (e.speculative_config for e in methods.plan(made))
    assert draft == {"method": "draft_model", "model": "a/b", "num_speculative_tokens": 7}
    assert eagle["method"] == "eagle3" and eagle["model"] == "a/b"
    assert ngram["num_speculative_tokens"] == 7 and ngram["prompt_lookup_max"] >= ngram["prompt_lookup_min"]


# --- figures


def answer(variant="vanilla", repeat=0, sample=0, emitted=(1, 1, 1), seconds=3.0, first=1.0, **more) -> dict:
    made = {
        "variant": variant, "benchmark": "chat", "temperature": 0.0, "sample": sample, "turn": 0, "repeat": repeat,
        "tokens": list(range(sum(emitted))), "emitted": list(emitted), "seconds": seconds, "first_token_seconds": first,
        "prompt_tokens": 5, "rounds": {}, "counters": {},
    }  # fmt: skip
    return {**made, **more}


def rounds(accepted, sizes, draft, verify) -> dict:
    return {"tree_size": list(sizes), "accepted": list(accepted), "draft_seconds": draft, "verify_seconds": verify}


ENGINES = [
    {"variants": [{"name": "vanilla", "tree": None}], "peak_reserved_gib": 3.0},
    {"variants": [{"name": "subspec", "tree": [2, 4]}], "peak_reserved_gib": 4.0},
    {"variants": [{"name": "subspec", "tree": [2, 4]}], "peak_reserved_gib": 4.5},
]
# Plain: 8 tokens after the first in 8 s. Subspec: 8 tokens in two passes of 2 s, of them 0.8 s draft, 1 s verification.
PLAIN = answer(emitted=[1] * 9, seconds=10.0, first=2.0)
OURS = answer(
    "subspec", emitted=(1, 5, 3), seconds=6.0, first=2.0, rounds=rounds([4, 3], [9, 7], [0.8, 0.8], [1.0, 1.0])
)


def test_figures_by_hand():
    """Catches: prefill counted as decoding, bonus not counted in tau, draft time a round taken for a pass, eta upside
    down. The second answer ends inside an accepted path: tau counts its last pass whole."""
    row = {r["method"]: r for r in measure.summarize([PLAIN, OURS], ENGINES)}["subspec"]
    figure = lambda key: row[key]["median"]  # noqa: E731
    assert figure("decode_speed") == pytest.approx(8 / 4) and figure("end_to_end_speed") == pytest.approx(9 / 6)
    assert figure("first_token") == 2.0 and figure("pass") == pytest.approx(2.0)
    assert figure("tau") == pytest.approx((5 + 4) / 2)
    assert figure("t_target") == pytest.approx(1.0) and figure("t_draft") == pytest.approx(1.6 / 7)
    assert figure("gamma") == pytest.approx(1.0)
    assert figure("speedup") == pytest.approx(2.0) and figure("eta") == pytest.approx(2.0 / 4.5)
    assert figure("formula_speedup") == pytest.approx(4.5 / 1.8)
    assert [figure(f"{p}_share") for p in ("draft", "verify", "other")] == pytest.approx([0.4, 0.5, 0.1])
    assert row["wait_share"] is None
    assert row["accepted_by_depth"] == [1.0, 1.0, 1.0, 1.0]  # the second tree has three levels
    assert row["peak_memory_gib"] == 4.5 and row["same_as_vanilla"] == 1.0


def test_timed_waits_are_a_phase_of_their_own():
    """Catches: waiting counted as verification as well; a plain step in a captured graph that hides the others."""
    waited = {**OURS, "rounds": {**OURS["rounds"], "wait_seconds": [0.7, 0.5]}}
    found = measure.phases([waited], [2, 4])
    shares = [found[f"{phase}_share"] for phase in ("draft", "verify", "wait", "other")]
    assert shares == pytest.approx([0.4, 0.2, 0.3, 0.1])
    assert found["verify"] == pytest.approx(1.0)  # gamma is of the whole verification
    partly = {**OURS, "rounds": {**OURS["rounds"], "wait_seconds": [0.7, None]}}
    assert measure.phases([partly], [2, 4])["wait_share"] == pytest.approx(0.7 / 4)


def test_acceptance_by_depth_counts_trees_that_reach_it():
    """Catches: shallow trees that count as rejections, cumulative and conditional rates mixed up."""
    made = answer("subspec", emitted=(1, 1, 3, 2), rounds=rounds([0, 2, 1], [9, 9, 3], [0.1] * 3, [0.1] * 3))
    assert measure.acceptance_by_depth([made], [2, 4]) == pytest.approx([2 / 3, 1 / 2, 0, 0])


def test_figures_of_vllms_own_methods_come_from_its_counters():
    """Catches: passes without a draft left out of tau, or counted as drafts in acceptance by depth."""
    counters = {"drafts": 2, "draft_tokens": 4, "accepted_tokens": 3, "accepted_per_pos:0": 2, "accepted_per_pos:1": 1}
    made = answer("ngram", emitted=(1, 2, 1, 3), seconds=4.0, counters=counters)
    assert measure.acceptance_length([made]) == pytest.approx(2.0)
    assert measure.acceptance_by_depth([made], None) == [1.0, 0.5]
    assert measure.phases([made], None)["draft"] is None


def test_tau_up_to_a_number_of_tokens():
    """Catches: a pass counted to the limit and not whole, one after it counted, the prefill's token forgotten."""
    made = answer("subspec", emitted=(1, 5, 4, 2), rounds=rounds([4, 3, 6], [9] * 3, [0.1] * 3, [0.1] * 3))
    assert measure.pass_tokens(made) == [5, 4, 7]
    assert [len(measure.pass_tokens(made, until)) for until in (1, 2, 6, 7, 10, 11, 99)] == [0, 1, 1, 2, 2, 3, 3]
    assert measure.acceptance_length([made, made], 7) == pytest.approx(4.5)
    cut = answer("ngram", emitted=(1, 3, 1), counters={"drafts": 2, "accepted_tokens": 4})
    assert measure.pass_tokens(cut) == [3, 3]


def test_ratios_compare_the_same_requests_of_the_same_repeat():
    """Catches: a speedup of other prompts, of another repeat, or of a method that ran without vanilla."""
    slow = answer(sample=1, emitted=[1] * 3, seconds=101.0, first=1.0)  # only vanilla answered this one
    later = answer("subspec", repeat=1, emitted=(1, 8), seconds=2.5, first=0.5)
    row = {r["method"]: r for r in measure.summarize([PLAIN, slow, OURS, later], ENGINES)}["subspec"]
    assert row["speedup"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert row["decode_speed"]["max"] == pytest.approx(4.0)
    assert row["same_as_vanilla"] == 1.0


def test_spread_and_pooled_row():
    """Catches: a mean for a median, temperatures or benchmarks mixed, a pooled row that averages averages."""
    assert measure.spread([5.0, 1.0, None, 2.0]) == {"median": 2.0, "min": 1.0, "max": 5.0}
    assert measure.spread([None]) is None
    other = answer(benchmark="code", emitted=[1] * 3, seconds=3.0, first=1.0)
    warm = answer(temperature=0.6, emitted=[1] * 3, seconds=2.0, first=1.0)
    summary = measure.summarize([PLAIN, other, warm], ENGINES)
    speeds = {(r["temperature"], r["benchmark"]): r["decode_speed"]["median"] for r in summary}
    assert speeds[0.0, "all"] == pytest.approx(10 / 10) and speeds[0.0, "code"] == 1.0 and speeds[0.6, "chat"] == 2.0


def test_greedy_texts_that_differ_are_told():
    other = {**OURS, "tokens": [9] * 9}
    assert measure.same_as([OURS, other], [PLAIN]) == 0.5


def test_plain_answers_cut_short():
    """Catches: a speedup of whole requests, where the plain one has a larger share of prefill; texts that differ because
    one was cut; a text that ends early, or goes on after its end, taken for the same."""
    short = answer(emitted=[1] * 5, seconds=6.0, first=2.0)
    row = {r["method"]: r for r in measure.summarize([short, OURS], ENGINES, 5)}["subspec"]
    assert row["speedup"]["median"] == pytest.approx(2.0) and row["t_target"]["median"] == pytest.approx(1.0)
    assert row["same_as_vanilla"] == 1.0
    assert measure.same_as([{**OURS, "tokens": [0, 1, 2, 9, 4, 5]}], [short], 5) == 0.0
    ended = answer(emitted=[1] * 3, seconds=4.0, first=2.0)  # of its own accord, before the limit
    assert measure.same_as([OURS], [ended], 5) == 0.0 and measure.same_as([ended], [short], 5) == 0.0
    assert measure.same_as([OURS], [short]) == 0.0


def test_time_left():
    """Catches: engine starts counted as requests, a method not yet seen estimated at nothing."""
    clock = Clock(
        Counter({("start", "vanilla"): 2, ("answer", "vanilla"): 4, ("start", "subspec"): 1, ("answer", "subspec"): 2})
    )
    assert clock.left() is None and clock.share() == 0
    clock.add(("start", "vanilla"), 10.0)
    clock.add(("answer", "vanilla"), 2.0)
    assert clock.left() == pytest.approx(10 + 3 * 2 + 10 + 2 * 2)
    clock.drop(("answer", "subspec"), 2)
    assert clock.left() == pytest.approx(26) and clock.share() == pytest.approx(2 / 7)


# --- the run, with made-up engines


class FakeEngines:
    """Stands for `run_engine`; what happens at the numbered answer of a method is told by ``at``."""

    def __init__(self, at: dict[tuple[str, int], BaseException | str] | None = None):
        self.at, self.jobs, self.asked, self.closed = at or {}, [], {}, 0

    def __call__(self, job, log, cpu, timeout):
        method = (job["speculative_config"] or {"method": "vanilla"})["method"]
        self.jobs.append(method)
        self.asked[method] = job["max_tokens"], [turns for b in job["benchmarks"] for turns in b["prompts"]]
        try:
            yield {"event": "started", "seconds": 1.0, "versions": {"vllm": "0"}, "device": "none"}
            number = 0
            for variant in job["variants"]:
                yield {"event": "warm", "variant": variant["name"]}
                for benchmark in job["benchmarks"]:
                    for sample in range(len(benchmark["prompts"])):
                        happens = self.at.get((method, number))
                        if isinstance(happens, BaseException):
                            raise happens
                        if happens is not None:
                            yield {"event": "failed", "error": happens}
                            return
                        number += 1
                        made = answer(variant["name"], sample=sample, benchmark=benchmark["name"])
                        yield {"event": "answer", **{k: v for k, v in made.items() if k != "repeat"}}
            yield {"event": "done", "peak_allocated_gib": None, "peak_reserved_gib": None}
        finally:
            self.closed += 1


def fake_run(tmp_path, engines, **given):
    made = settings.resolve(None, {"benchmarks": ["code", "math"], "samples": 2, "repeats": 2, **given})
    saved = []
    result = run.run_methods(made, "model", tmp_path, lambda r: saved.append(len(r["answers"])), True, run=engines)
    return result, saved


def test_repeats_are_interleaved(tmp_path):
    """Catches: A A B B in place of A B A B, an answer lost or counted for another repeat."""
    engines = FakeEngines()
    result, saved = fake_run(tmp_path, engines)
    assert engines.jobs == ["vanilla", "subspec"] * 2
    assert saved == [4, 8, 12, 16, 16]
    assert Counter((a["repeat"], a["variant"]) for a in result["answers"]).keys() == {
        (r, v) for r in (0, 1) for v in ("vanilla", "subspec")
    }
    assert not result["interrupted"] and not result["failures"]


def test_plain_tokens_are_vanillas(tmp_path):
    """Catches: other methods cut short, a plain conversation that goes on after another text than theirs, a clock that
    waits for turns that nobody asks."""
    engines, given = FakeEngines(), {"benchmarks": ["chat"], "max_tokens": 8, "plain_tokens": 2}
    fake_run(tmp_path, engines, **given)
    (plain, first_turns), (ours, turns) = engines.asked["vanilla"], engines.asked["subspec"]
    assert (plain, ours) == (2, 8) and first_turns == [t[:1] for t in turns] and all(len(t) == 2 for t in turns)
    made = settings.resolve(None, {**given, "samples": 2, "repeats": 1})
    steps = run._steps(methods.plan(made), run.load_benchmarks(made), made)
    assert (steps["answer", "vanilla"], steps["answer", "subspec"]) == (2, 4)


def test_ctrl_c_keeps_what_is_finished(tmp_path, capsys):
    """Catches: results lost, a report that cannot be written from half a run, an engine left running."""
    engines = FakeEngines({("subspec", 3): KeyboardInterrupt()})
    result, _ = fake_run(tmp_path, engines)
    result.update(command="bench", yaml=None)
    assert result["interrupted"] and engines.closed == 2 and engines.jobs == ["vanilla", "subspec"]
    assert Counter(a["variant"] for a in result["answers"]) == {"vanilla": 4, "subspec": 3}
    report.write(result, tmp_path)
    assert "interrupted" in (tmp_path / "results.md").read_text()
    assert json.loads((tmp_path / "results.json").read_text())["answers"] == result["answers"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_stopped_before_any_result_leaves_nothing(tmp_path, monkeypatch, capsys, number):
    """Catches: a directory without a result left behind, another's that is removed; results of another run replaced."""

    def engine_that_is_stopped(job, log, cpu, timeout):
        log.write_text("starting")
        os.kill(os.getpid(), number)
        time.sleep(5)
        yield {"event": "failed", "error": "was not stopped"}

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "results.json").write_text("of another run")
    monkeypatch.setattr(command, "run_methods", functools.partial(run.run_methods, run=engine_that_is_stopped))
    before = signal.getsignal(signal.SIGTERM)
    try:
        for name in ("new", "there"):
            status = main(["bench", "--model", str(tmp_path), "--out", str(tmp_path / name), "--samples", "1"])
            assert status == command.INTERRUPTED
            assert "before anything was measured" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "there" / "results.json").read_text() == "of another run"


def test_a_log_gets_a_line_a_stage(tmp_path, capsys):
    """Catches: minutes of silence where there is no terminal; a line for every answer."""
    fake_run(tmp_path, FakeEngines(), methods=["vanilla"], repeats=1, samples=3)
    lines = [re.sub(r"^0:0\d |, about .* left$", "", line) for line in capsys.readouterr().err.splitlines()]
    stages = ["starting", "warm-up", "measuring", "code", "math"]
    assert lines == [f"vanilla, repeat 1: {stage}" for stage in stages]


def test_a_method_that_fails_keeps_the_others(tmp_path):
    """Catches: a failure that ends the run or is not reported, and tries of what cannot work, again and again."""
    engines = FakeEngines({("ngram", 0): "ngram cannot run here"})
    result, _ = fake_run(tmp_path, engines, methods=["vanilla", "ngram", "subspec"])
    assert engines.jobs == ["vanilla", "ngram", "subspec", "vanilla", "subspec"]
    assert {r["method"] for r in result["summary"]} == {"vanilla", "subspec"}
    assert report.remarks(result) == ["ngram stopped: ngram cannot run here"]


# --- report


def stored(tmp_path: Path) -> dict:
    ngram_counters = {"drafts": 2, "accepted_tokens": 3, "accepted_per_pos:0": 2, "accepted_per_pos:1": 1}
    ngram = answer("ngram", emitted=(1, 2, 1, 3), seconds=4.0, counters=ngram_counters)
    answers = [
        {**a, "repeat": r, "benchmark": benchmark, "seconds": a["seconds"] * (1 + r / 10)}
        for r in (0, 1)
        for benchmark in ("chat", "code")
        for a in (PLAIN, OURS, ngram)
    ]
    engines = [{**e, "method": e["variants"][0]["name"], "skipped": 0} for e in ENGINES]
    result = {
        "format": run.FORMAT, "settings": {"model": "m", "methods": ["vanilla", "subspec", "ngram"]},
        "interrupted": False,
        "machine": {"device": "none", "versions": {"vllm": "0.32.0"}}, "engines": engines, "failures": {},
        "summary": measure.summarize(answers, ENGINES), "command": "vllm-subspec bench", "yaml": "samples: 2",
        "answers": answers,
    }  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps(result))
    return result


def test_a_stored_run_gives_its_report_again(tmp_path, capsys):
    """Catches: figures missing from table or page, plots not drawn, a run that cannot be repeated from its files."""
    stored(tmp_path)
    assert main(["bench", "--redo", str(tmp_path / "results.json"), "--out", str(tmp_path / "again")]) == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "again" / "results.md").read_text()
    for text in (printed, page):
        assert "subspec" in text and "4.50" in text and "chat" in text
    speeds = [2 / 1.0, 8 / (6.6 - 2)]
    assert f"{sum(speeds) / 2:.2f} ({min(speeds):.2f}-{max(speeds):.2f})" in page
    assert "samples: 2" in page and "0.32.0" in page
    names = {p.name for p in (tmp_path / "again").glob("*.png")}
    assert names == {f"{n}-t0.png" for n in ("speed", "acceptance", "shares")}
    assert all(f"]({name})" in page for name in names)


def test_a_run_is_kept_without_its_requests(tmp_path, capsys):
    """Catches: answers kept, pooled figures, settings, command or versions lost, a file that gives no tables any more."""
    stored(tmp_path)
    kept = tmp_path / "kept.json"
    assert main(["bench", "--summary", str(tmp_path / "results.json"), str(kept)]) == 0
    made, full = json.loads(kept.read_text()), json.loads((tmp_path / "results.json").read_text())
    assert {key for key in full if key not in made} == {"answers"}
    assert all(made[key] == full[key] for key in made if key != "summary")
    pooled = [r for r in full["summary"] if r["benchmark"] == "all"]
    assert [(r["method"], r["tau"]) for r in made["summary"]] == [("vanilla", 1.0), ("subspec", 4.5), ("ngram", 2.0)]
    assert made["summary"][1]["decode_speed"]["median"] == pytest.approx(pooled[1]["decode_speed"]["median"], rel=1e-3)
    assert main(["bench", "--redo", str(kept), "--out", str(tmp_path / "again")]) == 0
    shown = capsys.readouterr().out
    assert "4.50" in shown and (tmp_path / "again" / "results.md").exists()
    assert main(["bench", "--summary", str(ROOT / "pyproject.toml"), str(kept)]) != 0


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "results").glob("*.json")), ids=lambda p: p.name)
def test_kept_results_are_small_and_give_their_tables(path, tmp_path, capsys):
    """Catches: requests in the repository, a format that the bench no longer reads."""
    result = json.loads(path.read_text())
    assert path.stat().st_size < 40_000 and "answers" not in result
    if "format" in result:
        assert main(["bench", "--redo", str(path), "--out", str(tmp_path)]) == 0
        assert all(row["method"] in capsys.readouterr().out for row in result["summary"][:1])


def test_stored_runs_name_no_directories(tmp_path):
    """Catches: a path of this machine in a file that is meant for others."""
    made = settings.resolve(None, {"model": str(tmp_path), "benchmarks": [f"gsm8k={tmp_path}/test.jsonl", "chat"]})
    assert str(tmp_path) not in json.dumps(run._portable(made))
    assert command.portable(["--model", "/a/b/m", "gsm8k=/x/test.jsonl", "dtype=float32"]) == [
        "--model", "m", "gsm8k=test.jsonl", "dtype=float32",
    ]  # fmt: skip


def test_pydantic_errors_become_a_sentence():
    text = (
        "1 validation error for VllmConfig\n  Value error, subspec: lower it [type=value_error, input_value=1]\n more"
    )
    assert one_sentence(ValueError(text)) == "subspec: lower it"
    assert one_sentence(RuntimeError()) == "RuntimeError"


def test_tau_by_prompt(tmp_path, monkeypatch, capsys):
    """Catches: trees smaller near the limit, a failed engine's tau, settings or prompts mixed up in the table."""
    runs = []

    def fake(made, model, cpu):
        runs.append(made)
        tokens = made.subspec["tree_depth"]
        return {"failures": {}, "interrupted": False, "answers": [
            answer("subspec", emitted=(1, tokens, tokens), rounds=rounds([tokens - 1 + i] * 2, [9] * 2, [0.1], [0.1]))
            for i in range(6)
        ]}  # fmt: skip

    monkeypatch.setattr(tau, "run_without_files", fake)
    monkeypatch.setattr(tau, "prepare", lambda made: (made, "m", True))
    assert main(["tau", "--max-tokens", "12", "--setting", "2,4,0.5", "--setting", "3,20,1.0"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "4.00 (2) │ 20.00 (1)" in printed and "9.00 (2) │ 25.00 (1)" in printed
    assert "6.50 (12) │ 22.50 (6)" in printed
    assert [made.max_tokens for made in runs] == [12 + 8, 12 + 40] and runs[0].subspec["draft_temperature"] == 0.5
    assert all(made.subspec["confidence_threshold"] == 0 and made.benchmarks == ["six"] for made in runs)
    monkeypatch.setattr(tau, "run_without_files", lambda *given: {"failures": {"0-subspec": "no memory"}})
    assert main(["tau"]) == 1 and "no memory" in capsys.readouterr().err


def test_tune_prints_the_fastest(monkeypatch, capsys):
    """Catches: the fastest of one benchmark taken for the fastest of all, an engine's failure that nobody sees, a
    config to paste without the options that were measured."""
    trees = {"subspec width=2 depth=4": (12.0, 3.0), "subspec width=3 depth=8": (6.0, 5.0)}
    answers = [{**OURS, "variant": name, "seconds": s, "benchmark": benchmark}
               for name, seconds in trees.items() for benchmark, s in zip(("chat", "code"), seconds)]  # fmt: skip
    engines = [{"method": "subspec", "skipped": 0,
                "variants": [{"name": n, "tree": [int(n[14]), int(n[-1])]} for n in trees]}]  # fmt: skip
    made = {"summary": measure.summarize(answers, engines), "failures": {"0-subspec": "no memory"}, "settings": {},
            "engines": engines, "interrupted": False, "machine": {}}  # fmt: skip
    monkeypatch.setattr(tune, "run_without_files", lambda *given: made)
    monkeypatch.setattr(tune, "prepare", lambda given: (given, "m", True))
    assert main(["tune", "--widths", "2", "3", "--depths", "4", "8", "--subspec", "draft_temperature=0.4"]) == 0
    printed = capsys.readouterr().out
    assert (
        '"draft_temperature": 0.4, "tree_width": 3, "tree_depth": 8' in printed
        and "subspec stopped: no memory" in printed
    )


def test_draft_pass(tmp_path, monkeypatch, capsys):
    """Catches: a start that must fail, figures lost between the engine and the file, a path of this machine in it."""
    arguments = ["--model", str(tmp_path / "shapes"), "--out", str(tmp_path / "d.json"), "--subspec", "tree_depth=8"]
    found = {"tree": [6, 8], "verify_ms": 2.0, "t_draft_ms": {100: 1.5}, "kernels": []}
    events = [
        {"event": "started", "seconds": 3.0, "versions": {"vllm": "0"}, "device": "none"},
        {"event": "profile", **found},
        {"event": "done", "peak_allocated_gib": 1.0, "peak_reserved_gib": 2.0},
    ]
    monkeypatch.setattr(draft_pass, "run_job", lambda job: (jobs.append(job), iter(events))[1])
    jobs, said = [], {True: "CPU build", False: "no room for the tree"}
    for cpu, more in ((True, []), (False, ["--contexts", "2000"])):
        monkeypatch.setattr(draft_pass, "is_cpu_build", lambda cpu=cpu: cpu)
        with pytest.raises(SystemExit):
            draft_pass.main([*arguments, *more])
        assert said[cpu] in capsys.readouterr().err and not jobs
    assert draft_pass.main(arguments) == 0
    text = (tmp_path / "d.json").read_text()
    stored = json.loads(text)
    assert str(tmp_path) not in text and stored["machine"]["device"] == "none" and stored["start_seconds"] == 3.0
    assert stored["t_draft_ms"] == {"100": 1.5} and stored["verify_ms"] == 2.0 and stored["peak_reserved_gib"] == 2.0
    assert jobs[0]["speculative_config"]["tree_depth"] == 8 and jobs[0]["engine"]["load_format"] == "dummy"


# --- processes


def test_environment_of_engines(monkeypatch):
    """Catches: plain vLLM that runs with the interpreter, and an in-process engine with subspec without it."""
    names = {"SUBSPEC_ON_CPU", "TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER"}
    for name in names:
        monkeypatch.setenv(name, "1")
    assert not names & set(environment(subspec=False, cpu=True))
    assert names & set(environment(subspec=True, cpu=True)) == {"SUBSPEC_ON_CPU", "TRITON_INTERPRET"}
    monkeypatch.delenv("SUBSPEC_ON_CPU")
    assert "SUBSPEC_ON_CPU" not in environment(subspec=True, cpu=False)


@pytest.mark.parametrize("timeout, said", [(None, "ended with status"), (0.5, "--timeout")])
def test_a_process_that_dies_or_hangs_is_a_failure(tmp_path, monkeypatch, timeout, said):
    """Catches: a run that waits for ever, or goes on as if all had been measured."""
    stub = tmp_path / "stub"
    stub.write_text("#!/bin/sh\n" + ("exec sleep 60\n" if timeout else "exit 3\n"))
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    (event,) = run_engine({"speculative_config": None}, tmp_path / "log", True, timeout)
    assert event["event"] == "failed" and said in event["error"]


# --- end to end

SMALL = """
methods: [vanilla, subspec]
benchmarks: [chat, math]
samples: 1
repeats: 1
max_tokens: 12
temperature: [0, 0.6]
subspec: {tree_width: 3, substitute_group_size: 32}
sweep: {depth: [4, 6], confidence: [0.0, 0.99]}
engine: {dtype: float32, enforce_eager: true, max_model_len: 512}
"""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> str:
    import tiny

    path = tiny.make("llama", tmp_path_factory.mktemp("bench") / "tiny")
    tiny.add_tokenizer(path)
    return path


def command_line(*arguments: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "vllm_subspec.tools.cli", *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_end_to_end(tiny_model, tmp_path):
    """Catches: engines that do not start as the command starts them, second turns lost, rounds of the prefill counted,
    a sweep whose drafts are all alike. Two engines; the texts must be plain vLLM's."""
    (tmp_path / "small.yaml").write_text(SMALL)
    done = command_line(
        "bench", "--config", str(tmp_path / "small.yaml"), "--model", tiny_model, "--out", str(tmp_path / "out")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = report.read(tmp_path / "out" / "results.json")
    trees = [f"subspec depth={depth} confidence={threshold}" for depth in (4, 6) for threshold in (0.0, 0.99)]
    names = ["vanilla", *trees]
    assert Counter(a["variant"] for a in result["answers"]) == dict.fromkeys(names, 2 * 3)
    for a in result["answers"]:
        assert sum(a["emitted"]) == len(a["tokens"]) and 0 < a["first_token_seconds"] < a["seconds"]
        assert not a["rounds"] or len(a["rounds"]["accepted"]) == len(a["emitted"]) - 1
        # All but an answer's last pass are sent as they were accepted.
        assert not a["rounds"] or a["emitted"][1:-1] == [n + 1 for n in a["rounds"]["accepted"][:-1]]
    greedy = [a for a in result["answers"] if a["temperature"] == 0]
    sizes = [[n for a in greedy if a["variant"] == tree for n in a["rounds"]["tree_size"]] for tree in trees]
    assert [max(sizes[0]), max(sizes[2])] == [1 + 3 * 4, 1 + 3 * 6]
    assert sum(sizes[0]) > sum(sizes[1]) and sum(sizes[2]) > sum(sizes[3])  # a threshold ends drafts early
    assert all(r["same_as_vanilla"] in (None, 1.0) for r in result["summary"])
    assert result["yaml"] == SMALL and result["machine"]["versions"]["vllm"]
    assert tiny_model not in (tmp_path / "out" / "results.json").read_text()
    assert "subspec depth=6 confidence=0.0" in done.stdout and list((tmp_path / "out").glob("speed*.png"))
