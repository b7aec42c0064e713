"""Sharing is what makes the draft good: without it tau drops. So the other tests really test sharing."""

from __future__ import annotations

import engine
from prompts import requests
from test_lossless import tau, tokens


def test_tau_drops_without_the_shared_context_or_a_shared_layer(smollm2):
    """Catches: a draft that in truth has its own context or its own copies, and a tau that says nothing about it."""
    job = {
        "model": smollm2,
        "engine": {"max_model_len": 2048},
        "spec": {"tree_width": 2, "tree_depth": 8},
        "batches": [[r] for r in requests(20, 2)],
    }
    shared, blind, unshared = engine.subspec(
        [job, {**job, "probe": "private_context"}, {**job, "probe": "unshared_norm"}]
    )
    assert tokens(shared) == tokens(blind) == tokens(unshared)  # a bad draft costs speed, never a token
    assert tau(shared) > 3.0
    assert tau(blind) < 0.6 * tau(shared)
    assert tau(unshared) < 0.6 * tau(shared)
