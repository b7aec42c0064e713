"""What rounds tell about themselves, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.offloader import set_offloader
from vllm.model_executor.offloader.prefetch import PrefetchOffloader

from vllm_subspec.engine import stats
from vllm_subspec.engine.stats import Rounds, time_waits


@pytest.fixture
def offloader(monkeypatch):
    """vLLM's prefetch offloader, whose waits take 10 ms by a clock that nothing else moves."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(stats, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def wait(self, layer_idx):
        clock.now += 0.01

    monkeypatch.setattr(PrefetchOffloader, "_wait_for_layer", wait)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    made = object.__new__(PrefetchOffloader)  # its __init__ wants a CUDA stream
    set_offloader(made)
    yield made
    set_offloader(None)


def a_round(rounds: Rounds, offloader, waits: int) -> None:
    started = rounds.mark()
    drafted = rounds.mark()
    for layer_idx in range(waits):
        offloader._wait_for_layer(layer_idx)
    rounds.add("r", 7, torch.tensor(2), [started, drafted, rounds.mark()])


def test_waits_belong_to_their_round(offloader):
    """Catches: waits of one pass counted for the next, a draft that waited, a sum that is longer than the pass."""
    rounds = Rounds(torch.device("cpu"))
    a_round(rounds, offloader, 1)
    assert time_waits(rounds) and time_waits(rounds)  # twice is as once
    a_round(rounds, offloader, 3)
    a_round(rounds, offloader, 0)
    untimed, timed, without = rounds.take()
    assert (untimed["wait_seconds"], without["wait_seconds"]) == (None, None)
    assert timed["wait_seconds"] == timed["verify_seconds"] == pytest.approx(0.03)
    assert timed["draft_seconds"] == 0
    assert timed["accepted"] == 2 and rounds.take() == []


def test_nothing_waits_without_streamed_layers():
    """Catches: an engine without offloading that fails, or claims to wait."""
    assert not time_waits(Rounds(torch.device("cpu")))
