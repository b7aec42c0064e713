"""What vLLM's counters say of trees, without an engine; test_lossless.py, test_degrades.py and test_serving.py have
engines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.reader import get_metrics_snapshot
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm

from vllm_subspec.engine import plugin
from vllm_subspec.engine.scheduler import SubSpecScheduler

WIDTH, DEPTH = 6, 8


@pytest.fixture
def scheduler(monkeypatch):
    """Ours, whose base gets a step's counts from each request's draft rows and accepted tokens as vLLM's does."""

    def counted(self, output, accepted):
        stats = None
        for req_id, rows in output.scheduled_spec_decode_tokens.items():
            invalid = output.num_invalid_spec_tokens
            stats = self.make_spec_decoding_stats(
                stats, num_draft_tokens=len(rows), num_accepted_tokens=accepted.accepted[req_id],
                num_invalid_spec_tokens=invalid, request_id=req_id,
            )  # fmt: skip
            self.request.spec_decode_metrics.observe(len(rows) - invalid[req_id], accepted.accepted[req_id], True)
        return stats

    monkeypatch.setattr(Scheduler, "update_from_output", counted)
    monkeypatch.setattr(Scheduler, "add_request", lambda self, request: None)
    made = object.__new__(SubSpecScheduler)
    config = SimpleNamespace(method="subspec", tree_depth=DEPTH, num_speculative_tokens=WIDTH * DEPTH)
    made.__dict__.update(vllm_config=SimpleNamespace(speculative_config=config), log_stats=True)
    made.request = SimpleNamespace(spec_decode_metrics=RequestSpecDecodeMetrics.new(WIDTH * DEPTH))
    made.add_request(made.request)
    return made


def step(scheduler, rows: dict[str, int], levels: int, accepted: int = 0):
    """The counts of a step with so many draft rows of each request."""
    output = SimpleNamespace(scheduled_spec_decode_tokens={req_id: [-1] * n for req_id, n in rows.items()})
    return scheduler.update_from_output(
        output, SimpleNamespace(drafted_levels=levels, accepted=dict.fromkeys(rows, accepted))
    )


def test_a_draft_counts_as_its_levels(scheduler):
    """Catches: nodes counted, so that a tree accepted to its last level reads as a sixth; asked levels counted where
    the draft ended early; rows that carried no tree counted as a draft."""
    whole = step(scheduler, {"a": WIDTH * DEPTH}, levels=DEPTH, accepted=DEPTH)
    assert (whole.num_drafts, whole.num_draft_tokens, whole.num_accepted_tokens) == (1, DEPTH, DEPTH)
    assert whole.num_accepted_tokens_per_pos == whole.num_draft_tokens_per_pos == [1] * DEPTH
    early = step(scheduler, {"a": WIDTH * DEPTH}, levels=3, accepted=1)
    assert (early.num_drafts, early.num_draft_tokens, early.num_accepted_tokens) == (1, 3, 1)
    assert early.num_draft_tokens_per_pos == [1, 1, 1] + [0] * (DEPTH - 3)
    assert step(scheduler, {"a": WIDTH * DEPTH, "b": 6}, levels=0) is None
    of_request = scheduler.request.spec_decode_metrics.to_dict()
    assert of_request["num_spec_steps"] == 2 and of_request["num_draft_tokens"] == DEPTH + 3
    assert of_request["per_step_drafted"] == [DEPTH, 3] and of_request["num_spec_tokens"] == DEPTH
    assert of_request["acceptance_histogram"] == [0, 1] + [0] * (DEPTH - 2) + [1]


def test_a_tree_deeper_than_configured_is_counted_whole(scheduler):
    """Catches: a sweep's deeper tree that ends the engine by an index beyond the configured levels, or counts less."""
    deep = step(scheduler, {"a": WIDTH * DEPTH}, levels=2 * DEPTH, accepted=DEPTH + 3)
    assert (deep.num_drafts, deep.num_draft_tokens, deep.num_accepted_tokens) == (1, 2 * DEPTH, DEPTH + 3)
    assert deep.num_accepted_tokens_per_pos == [1] * DEPTH
    assert scheduler.request.spec_decode_metrics.histogram[DEPTH] == 1


def test_nothing_is_counted_without_statistics(scheduler):
    """Catches: counts that nobody asked for."""
    scheduler.log_stats = False
    assert step(scheduler, {"a": WIDTH * DEPTH}, levels=DEPTH) is None


def test_the_log_line_names_a_rate_a_level(scheduler):
    """Catches: a log line with hundreds of rates, or of another acceptance than what was accepted of the levels."""
    line, said = SpecDecodingLogging(), []
    for accepted in (DEPTH, 0):
        line.observe(step(scheduler, {"a": WIDTH * DEPTH}, levels=DEPTH, accepted=accepted))
    line.log(lambda text, *values: said.append(text % values))
    assert f"Per-position acceptance rate: {', '.join(['0.500'] * DEPTH)}, Avg Draft acceptance rate: 50.0%" in said[0]


@pytest.fixture
def registry():
    """Prometheus' global registry, as it was afterwards."""
    yield
    for collector in {c for name, c in REGISTRY._names_to_collectors.items() if "spec_decode" in name}:
        REGISTRY.unregister(collector)


def test_prometheus_has_a_position_for_each_level(scheduler, registry):
    """Catches: a counter for each node; levels and positions that do not fit each other, which ends the front end."""
    plugin.register()
    config = scheduler.vllm_config.speculative_config
    counters = SpecDecodingProm(config, ["engine"], {0: ["0"]})
    counters.observe(step(scheduler, {"a": WIDTH * DEPTH}, levels=DEPTH, accepted=2))
    values = {m.name: getattr(m, "value", getattr(m, "values", None)) for m in get_metrics_snapshot()}
    assert values["vllm:spec_decode_num_draft_tokens"] == DEPTH
    assert values["vllm:spec_decode_num_accepted_tokens_per_pos"] == [1, 1] + [0] * (DEPTH - 2)


def test_vllms_own_methods_are_counted_as_before(registry):
    """Catches: positions of another method changed by the plugin."""
    plugin.register()
    config = SimpleNamespace(method="ngram", num_speculative_tokens=5)
    SpecDecodingProm(config, ["engine"], {0: ["0"]})
    values = {m.name: getattr(m, "values", None) for m in get_metrics_snapshot()}
    assert values["vllm:spec_decode_num_accepted_tokens_per_pos"] == [0] * 5
