"""tau on the six prompts, against figures of an independent simulation of the algorithm."""

from __future__ import annotations

import pytest

from vllm_subspec.tools.bench.measure import acceptance_length
from vllm_subspec.tools.bench.tau import SETTINGS, measure

ORACLE = [15.00, 13.77, 11.89]
"""A separate plain-PyTorch program, float32, greedy, at most 128 tokens: all six prompts, per setting."""


@pytest.mark.slow
def test_tau_is_the_oracles(smollm2):
    """Catches: a draft or target that do not really share what they should. Within 5% in each of three settings.

    About 15 minutes on two cores.
    """
    results = measure(smollm2, SETTINGS, 128, dtype="float32", enforce_eager=True)
    for setting, answers, expected in zip(SETTINGS, results, ORACLE):
        assert acceptance_length(answers, 128) == pytest.approx(expected, rel=0.05), setting
