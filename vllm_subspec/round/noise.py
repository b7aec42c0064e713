"""The noise by which vLLM's sampler will choose, known to the draft before it chooses.

vLLM samples the token of the largest logit / temperature + noise. The noise depends on nothing but the request's seed,
the position and the token. So the draft adds it to its own logits, and what it then holds for likely is what the target
will emit if it finds the same logits, at any temperature. What is emitted stays the target's choice alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import _log1p_neg_stable, murmur3_uniform32, murmur3_uniform64

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates

CANDIDATES = 64
"""Likeliest tokens that the draft considers. Which token gets the largest noise of a whole vocabulary says little."""
EXCLUDED = tl.constexpr(1e4)
"""Subtracted from logits that top-k, top-p or min-p exclude: below all others, and still in their order"""


@triton.jit
def _noise_kernel(
    logits,  # [r, NUM] fp32, descending; logits with noise in their place
    tokens,  # [r, NUM] int64
    positions,  # [r] int64
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    NUM: tl.constexpr,
    PAD: tl.constexpr,
    USE_FP64: tl.constexpr,
):
    row, ranks = tl.program_id(0), tl.arange(0, PAD)
    inside = ranks < NUM
    at = row * NUM + ranks
    values = tl.load(logits + at, mask=inside, other=float("-inf"))
    temperature = tl.load(temperature_ptr)

    scaled = (values - tl.max(values, 0)) / temperature
    allowed = (ranks < tl.load(top_k_ptr)) & (scaled >= tl.log(tl.maximum(tl.load(min_p_ptr), 1e-30)))
    p = tl.where(inside & allowed, tl.exp(scaled), 0.0)
    before = tl.cumsum(p, 0) - p
    allowed = allowed & (before <= tl.load(top_p_ptr) * tl.sum(p, 0))

    seed, position = tl.load(seed_ptr), tl.load(positions + row)
    keys = tl.load(tokens + at, mask=inside, other=0)
    if USE_FP64:
        noise = -tl.log(-tl.log(murmur3_uniform64(seed, position, keys))).to(tl.float32)
    else:
        noise = -tl.log(-_log1p_neg_stable(murmur3_uniform32(seed, position, keys)))
    values += temperature * noise - tl.where(allowed, 0.0, EXCLUDED)
    tl.store(logits + at, values, mask=inside)


class SamplingNoise:
    """The sampling parameters of the request that is drafted for, in device tensors that stay where they are."""

    def __init__(self, device: torch.device):
        self.use_fp64 = False
        self.temperature, self.top_p = torch.ones((), device=device), torch.ones((), device=device)
        self.min_p = torch.zeros((), device=device)
        self.top_k = torch.full((), CANDIDATES, dtype=torch.int32, device=device)
        self.seed = torch.zeros((), dtype=torch.int64, device=device)

    def attach(self, sampler: Sampler) -> None:
        """Have vLLM's sampler choose by this noise.

        FlashInfer's, which vLLM takes for top-k and top-p where it can, draws from the same distribution at random: it
        would even draw one token for a tree and another for the path in it that this one was found on.
        """
        sampler.use_flashinfer = False
        self.use_fp64 = sampler.use_fp64_gumbel

    def read(self, states: SamplingStates, request: torch.Tensor) -> None:
        """Take the parameters of a request, without a wait.

        Args:
            request: [1] integer on the device, its row in vLLM's states
        """
        self.temperature.copy_(states.temperature.gpu[request][0])
        self.top_k.copy_(states.top_k.gpu[request][0])
        self.top_p.copy_(states.top_p.gpu[request][0])
        self.min_p.copy_(states.min_p.gpu[request][0])
        self.seed.copy_(states.seeds.gpu[request][0])

    def add(self, logits: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits with the noise that each of the likeliest tokens will have, times the temperature.

        Args:
            logits: [r, vocabulary]
            positions: [r] int64, of the token before each row's next one

        Returns:
            [r, c] float32 and the c tokens, [r, c] int64; c is `CANDIDATES` or the vocabulary.
        """
        count = min(CANDIDATES, logits.shape[1])
        values, tokens = logits.float().topk(count, dim=-1)
        _noise_kernel[(logits.shape[0],)](
            values, tokens, positions, self.temperature, self.top_k, self.top_p, self.min_p, self.seed,
            NUM=count, PAD=triton.next_power_of_2(count), USE_FP64=self.use_fp64, num_warps=2,
        )  # fmt: skip
        return values, tokens
