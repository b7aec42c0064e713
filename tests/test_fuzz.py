"""Random mixes of everything a request may be, against plain vLLM (see fuzz.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import engine
import pytest

SECONDS = 60


def fuzz(model: str, seed: int, seconds: float, tmp_path: Path) -> dict:
    out = tmp_path / "report.json"
    env = engine.environment(in_process=True, subspec_env=True)
    command = [sys.executable, str(Path(__file__).parent / "fuzz.py"), model, str(seed), str(seconds), str(out)]
    done = subprocess.run(command, env=env, timeout=10 * seconds + 300, capture_output=True, text=True)
    assert out.exists(), f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(out.read_text())


def check(report: dict) -> None:
    assert not report["problems"], report["problems"][0]
    assert report["requests"] >= 12 and report["accepted"] > 0


def test_random_requests_equal_plain_vllm(tiny_checkpoints, tmp_path):
    """Catches: any mix of arrival, parameters, abort, length and tree that changes a token, leaks a block or hangs."""
    check(fuzz(tiny_checkpoints["llama"], 1, SECONDS, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral_window"])
def test_an_hour_of_random_requests(tiny_checkpoints, tmp_path, family):
    """The same for twenty minutes a family; and memory does not grow once every kind of request has been seen."""
    report = fuzz(tiny_checkpoints[family], 2, 1200, tmp_path)
    check(report)
    if family == "llama":  # a window frees blocks, so that requests hardly push one another out
        assert report["preemptions"] > 0
    memory = report["memory_kib"]
    assert memory[-1] < 1.02 * memory[len(memory) // 2]
