"""vLLM's default compilation: the draft stays out of the target's compiled graph, and the compiler starts at all."""

from __future__ import annotations

import engine
from test_lossless import random_requests, tau, tokens


def test_a_compiled_engine_is_token_identical(tiny_checkpoints):
    """Catches: the interpreter's stand-in driver breaking torch's compiler; a draft that runs the compiled target."""
    job = {
        "model": tiny_checkpoints["qwen2"],
        "engine": {"enforce_eager": False, "max_model_len": 256},
        "batches": [[r] for r in random_requests(4, [20], 24)],
    }
    expected, answer = engine.run([job, {**job, "spec": {"tree_width": 3, "tree_depth": 5}}])
    assert tokens(answer) == tokens(expected)
    assert tau(answer) > 2.0
