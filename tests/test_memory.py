"""What the flag costs in memory where nobody says how many requests may run at a time: substitutes, a tree, no more."""

from __future__ import annotations

import engine
import pytest
import tiny
from prompts import requests

TREE = 64 * 2**20
"""Of SmolLM2: a tree's tensors, the logits of its nodes in bfloat16, rows a request for drafts that vLLM keeps"""
GRAPHS = 96 * 2**20
"""The draft's CUDA graphs with their memory, and kernels"""


def test_no_buffer_has_a_row_for_every_draft_of_every_request(tmp_path):
    """Catches: memory by requests x drafts x vocabulary, 1.7 GiB at vLLM's defaults, for what one request can use."""
    job = {
        "model": tiny.make("llama", tmp_path / "llama", vocab_size=32768),
        "engine": {"max_num_seqs": None, "max_model_len": 128, "num_gpu_blocks_override": 16},
        "batches": [], "buffers": True,
    }  # fmt: skip
    plain, ours = engine.run([job, {**job, "spec": {}}], in_process=True, subspec_env=True)
    print(plain["largest_buffer"], ours["largest_buffer"])
    assert ours["largest_buffer"] <= plain["largest_buffer"]


@pytest.mark.gpu
@pytest.mark.alone
def test_the_flag_costs_substitutes_and_a_tree(smollm2):
    """Catches: buffers that grow with the requests that may run at a time; logits of many trees at once in vLLM's
    warm-up, which nothing has measured when the KV cache takes what is left."""
    engine_arguments = {
        "dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": None, "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 2**30, "enforce_eager": True, "attention_backend": "TRITON_ATTN",
        "offload_group_size": 1, "offload_num_in_group": 1, "offload_prefetch_step": 2,
    }  # fmt: skip
    batches = [[r] for r in requests(64, 2)] + [requests(64, 4)]
    job = {"model": smollm2, "engine": engine_arguments, "batches": batches, "probe": "cost"}
    (plain,), (ours,) = engine.plain([job]), engine.subspec([job])
    plain, ours = plain["probe"], ours["probe"]
    costs = {name: (ours[name] - plain[name] - ours["substitutes"]) / 2**20 for name in ("alive", "most", "used")}
    print(f"substitutes {ours['substitutes'] / 2**20:.0f} MiB; besides {costs}")
    assert 0 < ours["substitutes"] < 2**28
    assert costs["alive"] < TREE / 2**20
    assert costs["most"] < TREE / 2**20
    assert costs["used"] < (TREE + GRAPHS) / 2**20
