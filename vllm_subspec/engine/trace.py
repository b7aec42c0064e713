"""Every round's tree, recorded on request: `Tracer` wraps two calls of a running engine while it is on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..round.tree import TokenTree

if TYPE_CHECKING:
    from .runner import SubSpecRunner


@dataclass
class TracedRound:
    """One round that verified a tree. Lists are by node; node 0 is the root."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    draft_logprobs: list[float]
    """The draft's log-probability of each node after its parent, at the draft temperature and, of a sampled request,
    with the sampler's noise; the root's is 0"""
    target_tokens: list[int]
    """The target's likeliest token after each node"""
    target_probs: list[float]
    """Its probability, before any sampling parameters"""
    path: list[int]
    """The accepted nodes, root first"""
    bonus: int
    """The token that the target chose after the path's last node"""


class Tracer:
    """Records rounds from its creation until `stop`.

    Draft steps run one by one meanwhile, not as a CUDA graph, so that each level's scores can be read: a traced
    engine is slower.
    """

    def __init__(self, runner: SubSpecRunner):
        self.speculator, self.verifier = runner.speculator, runner.rejection_sampler
        self.runner = runner
        self.rounds: list[TracedRound] = []
        self._levels: list[torch.Tensor] = []  # scores of the tree being drafted
        self._captured, self._verify = self.speculator.graph is not None, self.verifier.verify
        self.speculator.graph = None
        self.speculator.step = self._step
        self.verifier.verify = self._verified

    def stop(self) -> list[dict[str, Any]]:
        """Leave the engine as it was; returns the rounds as dictionaries of `TracedRound`."""
        del self.speculator.step
        self.verifier.verify = self._verify
        if self._captured:
            self.speculator.capture()
        return [asdict(r) for r in self.rounds]

    def _step(self, num_keys: int) -> None:
        if num_keys == 1:  # a new tree
            self._levels.clear()
        type(self.speculator).step(self.speculator, num_keys)
        self._levels.append(self.speculator.scores.clone())

    def _verified(self, logits: torch.Tensor, input_batch: Any) -> Any:
        if self.runner.round is None:
            return self._verify(logits, input_batch)
        tree = self.runner.round.tree
        target = likeliest(logits)  # before the sampler, which may write into the logits
        output = self._verify(logits, input_batch)
        scores = torch.cat([self._levels[0].new_zeros(1), *self._levels])[: len(tree)]
        drafted = len(scores)  # fewer than the tree has if the draft ended early
        emitted = output.sampled_token_ids[0, : int(output.num_sampled[0])].tolist()
        self.rounds.append(traced(tree.prefix(drafted), scores, *(rows[:drafted] for rows in target), emitted))
        return output


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's likeliest token and its probability, [N] each."""
    # In parts: a float copy of all rows could be more than the GPU has left.
    tops = [rows.float().softmax(dim=-1).max(dim=-1) for rows in logits.split(32)]
    return torch.cat([top.indices for top in tops]), torch.cat([top.values for top in tops])


def traced(
    tree: TokenTree, scores: torch.Tensor, target_tokens: torch.Tensor, target_probs: torch.Tensor, emitted: list[int]
) -> TracedRound:
    """What one round did.

    Args:
        tree: N nodes
        scores: [N], each node's score: the sum of log-probabilities from the root
        target_tokens: [N], the target's likeliest token after each node
        target_probs: [N], its probability
        emitted: the accepted tokens and the bonus token
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    children = {(parents[i], tokens[i]): i for i in range(1, len(tree))}
    path = [0]
    for token in emitted[:-1]:
        path.append(children[path[-1], token])
    return TracedRound(
        tokens=tokens,
        parents=parents,
        depths=tree.depths.tolist(),
        draft_logprobs=(scores - scores[tree.parents]).tolist(),
        target_tokens=target_tokens.tolist(),
        target_probs=target_probs.tolist(),
        path=path,
        bonus=emitted[-1],
    )
