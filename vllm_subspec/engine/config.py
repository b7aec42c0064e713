"""The speculative config of method ``subspec``: fields, defaults, validation."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import Field, ValidationError
from vllm.config import SpeculativeConfig
from vllm.config.utils import config, hash_factors

from .. import __version__
from ..round.limits import most_nodes

METHOD = "subspec"
OURS = (
    "tree_width",
    "tree_depth",
    "draft_temperature",
    "substitute_bits",
    "substitute_group_size",
    "substitute_layers",
    "share_kv",
    "async_transfer",
    "confidence_threshold",
)
ACCEPTED = ("method", "num_speculative_tokens", *OURS)


@config
class SubSpecConfig(SpeculativeConfig):
    """vLLM's SpeculativeConfig with the fields of SubSpec (paper, section 4). All are optional."""

    method: str = METHOD  # type: ignore[assignment]  # the base allows only vLLM's own method names
    tree_width: int = Field(default=6, ge=1, le=64)
    """k: leaves that every draft pass extends."""
    tree_depth: int = Field(default=48, ge=1, le=128)
    """D: draft passes, and levels of the tree. Fewer where the model length has no room for them."""
    draft_temperature: float = Field(default=0.2, gt=0.0, le=10.0)
    """T_d: divides the draft's logits before scores accumulate."""
    substitute_bits: Literal[4] = 4
    """Bits of a substitute weight."""
    substitute_group_size: int = Field(default=64, ge=8, le=1024)
    """Weights along the input dimension that share one scale and zero-point."""
    substitute_layers: Literal["auto", "offloaded", "all"] = "auto"
    """Which linears get a substitute: those the engine offloaded, every decoder layer's, or offloaded if any is."""
    share_kv: bool = True
    """Whether the draft reads the target's KV cache. For ablation only: without, it fills one of its own (see
    `vllm_subspec.tools.bench.ablation`), which takes half the KV cache's memory."""
    async_transfer: bool = True
    """Whether vLLM's prefetch offloader overlaps transfers with computing. For ablation only: without, each layer is
    transferred when it is reached."""
    confidence_threshold: float = Field(default=0.2, ge=0.0, lt=1.0)
    """A draft ends before tree_depth when the likeliest path's probability, at draft_temperature, falls below this. 0:
    never, as in the paper. It changes how much is drafted, never what is emitted."""

    def __post_init__(self):
        # What a step of one request may hold: where the model length has no room for the whole tree, fewer.
        room = most_nodes(getattr(self.target_model_config, "max_model_len", 1 << 30))
        self.num_speculative_tokens = min(self.tree_width * self.tree_depth, room)
        # The draft is made of the target: vLLM's per-draft settings all follow it.
        self.model = getattr(self.target_model_config, "model", None)
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config
        # One request is speculated; several run plain, through vLLM's own switch by batch size.
        self.num_speculative_tokens_per_batch_size = [(1, 1, self.num_speculative_tokens), (2, 2, 0)]

    def compute_hash(self) -> str:
        """This config's part of the key by which vLLM keeps compiled graphs from one start to the next.

        The target's graph may hold an operator of this plugin (see `vllm_subspec.weights.uva`), which no other method
        has, and another version may define otherwise. No option of ours changes it: the draft is not compiled.
        """
        return hash_factors({"vllm": super().compute_hash(), "method": self.method, "plugin": __version__})


def make_config(given: dict[str, Any], target_model_config: Any, target_parallel_config: Any) -> SubSpecConfig:
    """SubSpecConfig from a user's ``speculative_config``.

    Args:
        given: the user's keys

    Raises:
        ValueError: a key that does not exist, a value out of range, or a ``num_speculative_tokens`` other than
            width x depth; one sentence that names the option and the remedy.
    """
    given = dict(given)
    unknown = sorted(set(given) - set(ACCEPTED))
    if unknown:
        known_to_vllm = {f.name for f in fields(SpeculativeConfig)}
        why = "does not apply to" if set(unknown) <= known_to_vllm else "is not an option of"
        raise ValueError(
            f"subspec: {', '.join(unknown)} {why} method subspec; "
            f"remove it (options: {', '.join(a for a in ACCEPTED if a != 'method')})"
        )
    wanted = given.pop("num_speculative_tokens", None)
    given.pop("method", None)
    try:
        made = SubSpecConfig(
            **given, target_model_config=target_model_config, target_parallel_config=target_parallel_config
        )
    except ValidationError as error:
        problem = error.errors()[0]
        where = f"{problem['loc'][0]} is {problem['input']!r}; " if problem["loc"] else ""
        raise ValueError(f"subspec: {where}{problem['msg'][0].lower()}{problem['msg'][1:]}") from None
    nodes = made.tree_width * made.tree_depth
    if wanted is not None and wanted != nodes:
        raise ValueError(
            f"subspec: num_speculative_tokens is {wanted} but tree_width x tree_depth is {made.tree_width} x "
            f"{made.tree_depth} = {nodes}; leave num_speculative_tokens out"
        )
    return made


def is_about_method(line: dict[str, Any]) -> bool:
    """Whether a line of pydantic's (`ValidationError.errors`) says that there is no such method."""
    return line["type"] == "literal_error" and line["loc"] == ("method",)


def with_subspec(error: ValidationError) -> ValidationError:
    """vLLM's error about a speculative method that it does not know, with ours among those that there are."""
    lines = [{key: line[key] for key in ("type", "loc", "input", "ctx") if key in line} for line in error.errors()]
    for line in filter(is_about_method, lines):
        meant = get_close_matches(str(line["input"]).lower(), [METHOD])
        hint = f" (did you mean {METHOD}?)" if meant else ""
        line["ctx"] = {"expected": f"'{METHOD}'{hint}, {line['ctx']['expected']}"}
    return ValidationError.from_exception_data(error.title, lines)
