"""The compatibility manifest, and other vLLM versions."""

from __future__ import annotations

import pytest
import yaml

from vllm_subspec import versions
from vllm_subspec.engine import compat, plugin


def test_the_manifest_matches_the_installed_vllm():
    """Catches: a symbol that we override changed under us; a symbol that does not exist."""
    assert compat.changed_symbols(compat.manifest_path()) == []


def test_every_entry_says_why():
    """Catches: entries nobody can judge when they change."""
    for entry in yaml.safe_load(compat.manifest_path().read_text())["symbols"]:
        assert set(entry) == {"symbol", "why", "sha256"} and len(entry["why"]) > 10


@pytest.mark.parametrize("change", ["sha256", "symbol"])
def test_a_changed_symbol_stops_the_start_and_is_named(tmp_path, change):
    """Catches: a mismatch that is only logged, or not named."""
    manifest = yaml.safe_load(compat.manifest_path().read_text())
    entry = manifest["symbols"][3]
    entry[change] = entry[change] + "0"
    path = tmp_path / "manifest.yaml"
    path.write_text(yaml.safe_dump(manifest))
    with pytest.raises(RuntimeError, match=entry["symbol"].replace(".", r"\.")):
        compat.check_manifest(path)


def test_rewrite_accepts_the_installed_sources(tmp_path):
    """Catches: a rewrite command that writes something else than what the check compares."""
    manifest = yaml.safe_load(compat.manifest_path().read_text())
    manifest["symbols"][0]["sha256"] = "0" * 64
    path = tmp_path / "manifest.yaml"
    path.write_text(yaml.safe_dump(manifest))
    compat.rewrite_manifest(path)
    assert compat.changed_symbols(path) == []


@pytest.mark.parametrize("version,fits", [("0.32.0", True), ("0.32.1+cpu", True), ("0.33.0", False), ("0.3.2", False)])
def test_supported_versions(version, fits):
    """Catches: a version taken for ours by its prefix."""
    assert versions.is_supported(version) is fits


def test_another_version_is_left_untouched_with_one_sentence(monkeypatch):
    """Catches: hooks set on a vLLM they were not written for."""
    from vllm.engine.arg_utils import EngineArgs

    before = EngineArgs.create_speculative_config
    monkeypatch.setattr(plugin, "vllm_build", lambda: ("vllm", "0.40.0"))
    monkeypatch.setattr(plugin, "_wrap", lambda *args: pytest.fail("hooked"))
    said = []
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *values: said.append(text % values))
    plugin.register()
    assert EngineArgs.create_speculative_config is before
    assert said == ["subspec: this plugin needs vLLM 0.32.x and is off on vLLM 0.40.0"]


def test_registering_twice_hooks_once():
    """Catches: wrappers piling up, since vLLM may load plugins more than once."""
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    once = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is once
