"""The target's logits at every node of a tree are those of a plain forward over that node's path."""

from __future__ import annotations

import engine
import pytest
import torch
from test_lossless import random_requests


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral_window"])
def test_logits_of_every_node_equal_a_plain_forward_over_its_path(tiny_checkpoints, family):
    """Catches: a node that sees a sibling, a wrong rotary position, a wrong window, KV of an earlier round left over.

    Tolerance: 2e-4 of the largest logit, float32, against transformers.
    """
    from transformers import AutoModelForCausalLM

    path = tiny_checkpoints[family]
    job = {"model": path, "batches": [[r] for r in random_requests(3, [20, 37], 16)], "probe": "verified_trees"}
    (answer,) = engine.subspec([job], tree_width=3, tree_depth=5, confidence_threshold=0.0)  # every node is there
    assert len(answer["probe"]) == 4
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for seen in answer["probe"]:
        for node, logits in enumerate(seen["logits"]):
            branch = [node]
            while branch[0] != 0:
                branch.insert(0, seen["parents"][branch[0]])
            ids = torch.tensor([seen["context"] + [seen["tokens"][n] for n in branch]])
            with torch.no_grad():
                expected = model(ids).logits[0, -1]
            assert (torch.tensor(logits) - expected).abs().max() < 2e-4 * expected.abs().max()
