"""The sampler's noise in the draft, against vLLM's own sampler."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def states_of(**parameters):
    """As much of vLLM's SamplingStates as is read: one row of each parameter, the second of three requests."""
    kinds = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    rows = {
        name: SimpleNamespace(gpu=torch.tensor([7, value, 7], dtype=kinds.get(name, torch.int64), device=DEVICE))
        for name, value in parameters.items()
    }
    return SimpleNamespace(**rows)


def vllms_choice(logits, positions, states):
    """What vLLM's sampler takes: temperature, min-p, top-k and top-p, then the largest with noise."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
    from vllm.v1.worker.gpu.sample.min_p import apply_min_p

    rows = torch.ones(logits.shape[0], dtype=torch.int32, device=DEVICE)
    logits = logits.float().clone()
    apply_temperature(logits, rows, states.temperature.gpu)
    apply_min_p(logits, rows, states.min_p.gpu)
    logits = apply_top_k_top_p_pytorch(logits, states.top_k.gpu[rows.long()], states.top_p.gpu[rows.long()])
    return gumbel_sample(
        logits, rows, states.temperature.gpu, states.seeds.gpu, positions, apply_temperature=False, is_drafting=False
    )


@pytest.mark.parametrize("case", range(12))
def test_a_draft_of_the_targets_logits_knows_the_targets_choice(case):
    """Catches: another noise than the sampler's, of another position or token; temperature on one of both only;
    top-k, top-p or min-p in another order, or off by one."""
    from vllm_subspec.round.noise import CANDIDATES, SamplingNoise

    rnd = random.Random(case)
    vocabulary = rnd.choice([40, CANDIDATES, 500])
    states = states_of(
        temperature=rnd.choice([0.3, 0.7, 1.0, 1.5]),
        top_k=rnd.choice([1, 5, 20] if vocabulary > CANDIDATES else [1, 20, vocabulary]),
        top_p=rnd.choice([0.5, 0.9, 1.0]),
        min_p=rnd.choice([0.0, 0.05]),
        seeds=rnd.choice([3, 2**40 + 1, -(2**60) - 5]),
    )
    torch.manual_seed(case)
    logits = 3 * torch.randn(30, vocabulary, device=DEVICE)
    positions = torch.randint(0, 5000, (30,), device=DEVICE)
    noise = SamplingNoise(torch.device(DEVICE))
    noise.read(states, torch.tensor([1], device=DEVICE))
    values, tokens = noise.add(logits, positions)
    assert (
        tokens.gather(1, values.argmax(-1, keepdim=True))[:, 0].tolist()
        == vllms_choice(logits, positions, states).tolist()
    )
    assert values.isfinite().all()


def test_the_sampler_draws_by_the_noise_that_is_known():
    """Catches: FlashInfer's sampler, which draws at random, where vLLM takes it; single precision for double."""
    from vllm_subspec.round.noise import SamplingNoise

    sampler, noise = SimpleNamespace(use_flashinfer=True, use_fp64_gumbel=True), SamplingNoise(torch.device("cpu"))
    noise.attach(sampler)
    assert sampler.use_flashinfer is False and noise.use_fp64
