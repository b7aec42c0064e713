"""Methods as vLLM's speculative configs, grouped into engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from .settings import NEED_DRAFT, SWEEPS, Settings

NGRAM = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
SHAPE = ("tree_width", "tree_depth")
"""Options of a tree that a running engine can change"""
ABLATION: dict[str, dict[str, Any]] = {
    "1 substitutes": {"share_kv": False, "draft_temperature": 1.0, "async_transfer": False},
    "2 + shared KV": {"draft_temperature": 1.0, "async_transfer": False},
    "3 + sharpening": {"async_transfer": False},
    "4 + async transfer": {},
}
"""Steps of --ablate, and the options that they set (paper, ablation study). All share layers; the last is the method."""


@dataclass(frozen=True)
class Variant:
    """One row of the report."""

    name: str
    """The method, and what a sweep or an ablation sets: ``subspec depth=8``, ``subspec 2 + shared KV``"""
    tree: tuple[int, int] | None = None
    """Width and depth, for subspec"""


@dataclass(frozen=True)
class Engine:
    """One engine process of a repeat, and the variants that it measures one after the other."""

    method: str
    speculative_config: dict[str, Any] | None
    variants: tuple[Variant, ...]

    @property
    def name(self) -> str:
        """What a failure of it is told under."""
        return self.variants[0].name if len(self.variants) == 1 else self.method


def plan(settings: Settings) -> list[Engine]:
    """The engines of one repeat, in the order in which they run.

    Trees of several shapes share an engine that is configured for the largest.

    Raises:
        ValueError: a tree whose width or depth is no whole number.
    """
    engines = []
    for method in settings.methods:
        if method == "subspec":
            engines += _ablation(settings) if settings.ablate else _subspec(settings)
        else:
            engines.append(Engine(method, _vllms_own(method, settings), (Variant(method),)))
    return engines


def _vllms_own(method: str, settings: Settings) -> dict[str, Any] | None:
    if method == "vanilla":
        return None
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": settings.draft_tokens}
    if method in NEED_DRAFT:
        config.update({"model": settings.draft, **settings.draft_options})
    if method == "ngram":
        config.update(NGRAM)
    return config


def _subspec(settings: Settings) -> list[Engine]:
    groups: dict[tuple, list[tuple[Variant, dict]]] = {}
    for values in product(*settings.sweep.values()):
        swept = dict(zip(settings.sweep, values))
        options = {**settings.subspec, **{SWEEPS[key]: value for key, value in swept.items()}}
        name = " ".join(["subspec", *(f"{key}={value}" for key, value in swept.items())])
        shape = tuple(options.pop(key, default) for key, default in zip(SHAPE, default_tree()))
        if not all(isinstance(side, int) for side in shape):
            raise ValueError(f"a tree's width and depth are whole numbers, not {shape[0]!r} and {shape[1]!r}")
        groups.setdefault(tuple(sorted(options.items())), []).append((Variant(name, shape), options))
    engines = []
    for members in groups.values():
        variants = tuple(variant for variant, _ in members)
        width, depth = max((v.tree for v in variants), key=lambda tree: tree[0] * tree[1])
        config = {"method": "subspec", "tree_width": width, "tree_depth": depth, **members[0][1]}
        engines.append(Engine("subspec", config, variants))
    return engines


def _ablation(settings: Settings) -> list[Engine]:
    """The same tree four times, with ever more of the method on."""
    engines = []
    for step, options in ABLATION.items():
        (engine,) = _subspec(replace(settings, subspec={**settings.subspec, **options}))
        engines.append(replace(engine, variants=(replace(engine.variants[0], name=f"subspec {step}"),)))
    return engines


def default_tree() -> tuple[int, int]:
    """Width and depth of a tree where the options name none."""
    from ..config import SubSpecConfig

    defaults = SubSpecConfig.__dataclass_fields__
    return tuple(defaults[key].default.default for key in SHAPE)
