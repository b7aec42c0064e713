"""What a run measures: defaults, then a YAML file, then the command line; and whether it can work."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ..sizes import parse_size
from . import datasets

METHODS = ("vanilla", "subspec", "draft_model", "eagle", "eagle3", "ngram")
NEED_DRAFT = ("draft_model", "eagle", "eagle3")
SWEEPS = {
    "tree": ("tree_width", "tree_depth"), "depth": ("tree_depth",), "width": ("tree_width",),
    "draft_temperature": ("draft_temperature",), "confidence": ("confidence_threshold",),
    "group_size": ("substitute_group_size",),
}  # fmt: skip
"""Names of --sweep, and the options of method subspec that they set; a tree is WIDTHxDEPTH"""


@dataclass(frozen=True)
class Settings:
    """One run. The keys of a YAML file are these names."""

    model: str | None = None
    """Local path or hub id; None is SmolLM2-135M-Instruct"""
    methods: list[str] = field(default_factory=lambda: ["vanilla", "subspec"])
    benchmarks: list[str] = field(default_factory=lambda: list(datasets.OWN))
    """NAME of our own prompts (`datasets.OWN`, `datasets.SIX`) or NAME=PATH of a public dataset's file"""
    samples: int = 8
    """Prompts of each benchmark"""
    seed: int = 0
    """Chooses the samples, and seeds sampled requests"""
    max_tokens: int = 256
    """Of each answer"""
    plain_tokens: int | None = None
    """Of each answer of vanilla, where fewer will do: a plain pass costs the same at every token. Ratios compare speeds
    after the first token; of a conversation, first turns only"""
    temperature: list[float] = field(default_factory=lambda: [0.0])
    repeats: int = 3
    """Each method runs so often, in turn with the others"""
    draft: str | None = None
    """Draft checkpoint of draft_model, eagle and eagle3"""
    draft_tokens: int = 5
    """Tokens that draft_model, eagle, eagle3 and ngram propose in a round"""
    draft_options: dict[str, Any] = field(default_factory=dict)
    """Further keys of vLLM's speculative config for draft_model, eagle and eagle3"""
    subspec: dict[str, Any] = field(default_factory=dict)
    """Options of method subspec"""
    sweep: dict[str, list] = field(default_factory=dict)
    """Values of options of method subspec (see `SWEEPS`); every combination is measured. If the method's own options
    are one of them, the others are measured at the first temperature only"""
    ablate: bool = False
    """Method subspec in five steps, each with more of it switched on (see `methods.ABLATION`); the first ones at
    the first temperature only. With a sweep of which the method's own options are part, that is the last step"""
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of vllm.LLM, the same for all methods"""
    vram: str | None = None
    """GPU memory that the process may use, as 8GiB"""
    timeout: float | None = None
    """Seconds for each engine process; what it measured until then counts"""


def resolve(yaml_text: str | None, flags: dict[str, Any]) -> Settings:
    """Settings of a run.

    Args:
        yaml_text: content of a YAML file
        flags: what the command line gave; None means not given. Mappings are merged key by key.

    Raises:
        ValueError: an unknown key, or a value that cannot work; one sentence.
    """
    try:
        given = yaml.safe_load(yaml_text) if yaml_text else {}
    except yaml.YAMLError as error:
        raise ValueError(f"the YAML file does not parse: {' '.join(str(error).split())}") from None
    given = given or {}
    names = [f.name for f in fields(Settings)]
    unknown = sorted(set(given) - set(names)) if isinstance(given, dict) else ["(no mapping)"]
    if unknown:
        raise ValueError(f"the YAML file has the unknown key {unknown[0]!r}; keys are {', '.join(names)}")
    settings = replace(Settings(), **{key: value for key, value in given.items() if value is not None})
    for key, value in flags.items():
        if value is not None:
            merged = {**getattr(settings, key), **value} if isinstance(value, dict) else value
            settings = replace(settings, **{key: merged})
    try:
        settings = replace(settings, temperature=[float(t) for t in _checked(settings, "temperature", list)])
    except (TypeError, ValueError):
        raise ValueError(f"temperature is a list of numbers, not {settings.temperature!r}") from None
    _check(settings)
    return settings


def _checked(settings: Settings, name: str, kind: type) -> Any:
    value = getattr(settings, name)
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, not {value!r}")
    return value


def _check(settings: Settings) -> None:
    for name in ("methods", "benchmarks"):
        if not _checked(settings, name, list):
            raise ValueError(f"{name} is empty; name at least one")
        if len(set(getattr(settings, name))) < len(getattr(settings, name)):
            raise ValueError(f"{name} names something twice")
    if min(settings.temperature, default=-1) < 0:
        raise ValueError("temperature is one or more numbers, none below 0")
    for name in ("samples", "max_tokens", "repeats", "draft_tokens"):
        if _checked(settings, name, int) < 1:
            raise ValueError(f"{name} is {getattr(settings, name)}; it must be at least 1")
    if settings.plain_tokens is not None and _checked(settings, "plain_tokens", int) < 2:
        raise ValueError(f"plain_tokens is {settings.plain_tokens}; it must be at least 2: the prefill gives the first")
    for name in ("draft_options", "subspec", "sweep", "engine"):
        _checked(settings, name, dict)
    for method in settings.methods:
        if method not in METHODS:
            raise ValueError(f"there is no method {method!r}; choose from {', '.join(METHODS)}")
        if method in NEED_DRAFT and settings.draft is None:
            raise ValueError(f"method {method} needs a draft checkpoint; give --draft MODEL")
    for key, values in settings.sweep.items():
        if key not in SWEEPS:
            raise ValueError(f"--sweep knows {', '.join(SWEEPS)}, not {key!r}")
        if not isinstance(values, list) or not values:
            raise ValueError(f"--sweep {key} needs values, as {key}={'6x48,16x32' if key == 'tree' else '8,16'}")
        if key == "tree" and not settings.sweep.keys().isdisjoint(("width", "depth")):
            raise ValueError("--sweep takes either tree, or width and depth")
    if _checked(settings, "ablate", bool):
        _check_ablation(settings)
    if settings.sweep and "subspec" not in settings.methods:
        raise ValueError("--sweep varies method subspec, which is not among the methods; add it to --methods")
    if settings.vram is not None:
        parse_size(settings.vram)


def _check_ablation(settings: Settings) -> None:
    if "subspec" not in settings.methods:
        raise ValueError("--ablate takes method subspec apart, which is not among the methods; add it to --methods")
    for key in ("share_kv", "async_transfer"):
        if key in settings.subspec:
            raise ValueError(f"--ablate sets {key} of method subspec itself; leave it out of --subspec")


def check_model(model: str) -> None:
    """Whether ``model`` can be a checkpoint: a directory with config.json, or a hub id.

    Raises:
        FileNotFoundError: it cannot; one sentence.
    """
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise FileNotFoundError(f"{model} is not a model: it has no config.json")
    if not path.is_dir() and not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise FileNotFoundError(f"there is no model directory {model}, and it is no hub id (OWNER/NAME) either")


def parse_pairs(items: list[str] | None, option: str) -> dict[str, Any] | None:
    """A mapping of ``key=value`` items; values as YAML reads them, so that 1, true and {"mode": 0} are what they look.

    Raises:
        ValueError: an item without "=".
    """
    if items is None:
        return None
    pairs = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise ValueError(f"{option} takes key=value, not {item!r}")
        pairs[key.strip()] = _value(value, option)
    return pairs


def parse_sweep(items: list[str] | None) -> dict[str, list] | None:
    """A mapping of ``depth=8,16`` items.

    Raises:
        ValueError: an item without "=".
    """
    pairs = parse_pairs(items, "--sweep")
    if pairs is None:
        return None
    return {key: [_value(v, "--sweep") for v in str(value).split(",")] for key, value in pairs.items()}


def _value(text: str, option: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"{option} cannot read the value {text!r}") from None
