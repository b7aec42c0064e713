"""Methods as vLLM's speculative configs, grouped into engines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from .settings import NEED_DRAFT, SWEEPS, Settings

NGRAM = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
SHAPE = ("tree_width", "tree_depth")
LIVE = ("draft_temperature", "confidence_threshold")
"""The other options of a draft that a running engine can change"""
ABLATION: dict[str, dict[str, Any]] = {
    "1 substitutes": {
        "share_kv": False, "draft_temperature": 1.0, "async_transfer": False, "confidence_threshold": 0.0,
    },
    "2 + shared KV": {"draft_temperature": 1.0, "async_transfer": False, "confidence_threshold": 0.0},
    "3 + sharpening": {"async_transfer": False, "confidence_threshold": 0.0},
    "4 + async transfer": {"confidence_threshold": 0.0},
    "5 + early ends": {},
}  # fmt: skip
"""Steps of --ablate, and the options that they set: the paper's four (ablation study), and drafts that end early.
The last is the method."""


@dataclass(frozen=True)
class Variant:
    """One row of the report."""

    name: str
    """The method, and what a sweep or an ablation sets: ``subspec depth=8``, ``subspec 2 + shared KV``"""
    tree: tuple[int, int] | None = None
    """Width and depth, for subspec"""
    draft: dict[str, float] = field(default_factory=dict)
    """The options of `LIVE`, for subspec"""
    first_only: bool = False
    """Measured at the first temperature only"""


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

    Drafts that differ in `SHAPE` and `LIVE` options share an engine that is configured for the largest tree.

    Raises:
        ValueError: a tree whose width or depth is no whole number, or a swept one that is not of the form 6x48.
    """
    engines = []
    for method in settings.methods:
        if method == "subspec":
            if settings.sweep or not settings.ablate:
                engines += _subspec(settings)
            if settings.ablate:
                engines += _ablation(settings)
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
    swept = _swept(settings)
    has_own = any(own for *_, own in swept)
    groups: dict[tuple, list[Variant]] = {}
    for name, options, own in swept:
        tree = tuple(options.pop(side) for side in SHAPE)
        draft = {option: options.pop(option) for option in LIVE}
        variant = Variant(name, tree, draft, first_only=has_own and not own)
        groups.setdefault(tuple(sorted(options.items())), []).append(variant)
    engines = []
    for options, variants in groups.items():
        width, depth = max((v.tree for v in variants), key=lambda tree: tree[0] * tree[1])
        config = {"method": "subspec", "tree_width": width, "tree_depth": depth, **variants[0].draft, **dict(options)}
        engines.append(Engine("subspec", config, tuple(variants)))
    return engines


def _swept(settings: Settings) -> list[tuple[str, dict[str, Any], bool]]:
    """Of each combination of swept values its name, the method's options, and whether those are the settings'."""
    own = {**{option: _default(option) for option in (*SHAPE, *LIVE)}, **settings.subspec}
    made = []
    for values in product(*settings.sweep.values()):
        chosen = dict(zip(settings.sweep, values))
        options = dict(own)
        for key, value in chosen.items():
            options.update(zip(SWEEPS[key], parse_tree(value) if key == "tree" else (value,)))
        width, depth = (options[side] for side in SHAPE)
        if not (isinstance(width, int) and isinstance(depth, int) and width > 0 and depth > 0):
            raise ValueError(f"a tree's width and depth are whole numbers above zero, not {width!r} and {depth!r}")
        name = " ".join(["subspec", *(f"{key}={value}" for key, value in chosen.items())])
        made.append((name, options, _without_defaults(options) == _without_defaults(own)))
    return made


def parse_tree(text: Any) -> tuple[int, int]:
    """Width and depth of ``6x48``.

    Raises:
        ValueError: another form.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", str(text))
    if match is None:
        raise ValueError(f"--sweep tree takes WIDTHxDEPTH, as 6x48, not {text!r}")
    return int(match[1]), int(match[2])


def _without_defaults(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value != _default(name)}


def _ablation(settings: Settings) -> list[Engine]:
    """The same tree with ever more of the method on, in five steps: without those that the settings make the same as
    one before, or that a sweep measures."""
    method = _without_defaults(settings.subspec)
    measured = [method] if settings.sweep and any(own for *_, own in _swept(settings)) else []
    engines = []
    for step, options in ABLATION.items():
        subspec = {**settings.subspec, **options}
        if (chosen := _without_defaults(subspec)) in measured:
            continue
        measured.append(chosen)
        (engine,) = _subspec(replace(settings, sweep={}, subspec=subspec))
        variant = replace(engine.variants[0], name=f"subspec {step}", first_only=chosen != method)
        engines.append(replace(engine, variants=(variant,)))
    return engines


def default_tree() -> tuple[int, int]:
    """Width and depth of a tree where the options name none."""
    return tuple(_default(key) for key in SHAPE)


def _default(option: str) -> Any:
    """What method subspec takes for an option that is left out; None if it has no such option."""
    from ...engine.config import SubSpecConfig

    field = SubSpecConfig.__dataclass_fields__.get(option)
    return getattr(field.default, "default", field.default) if field else None
