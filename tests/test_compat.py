"""The compatibility manifest, and other vLLM versions."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

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


SOURCE = '''
"""A module."""

class Thing:
    """A thing."""

    size: int = 3
    """Its size."""

    def grow(self, by: int = 1) -> "Thing":
        return f"{self.size + by:>{by}} {by=}"  # larger

    def hold(self):
        """To be overridden."""

TABLE: dict = {"a": Thing, "b": 1}
'''


@pytest.fixture
def manifest_of(tmp_path, monkeypatch):
    """A package with the module above, and the manifest of all of it. Returns a function: the module's text replaced,
    the names of what changed."""
    (tmp_path / "made_up").mkdir()
    (tmp_path / "made_up" / "__init__.py").write_text("raise ImportError('only to be read')")
    module, path = tmp_path / "made_up" / "things.py", tmp_path / "manifest.yaml"
    module.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    names = ["Thing", "Thing.size", "Thing.grow", "Thing.hold", "TABLE"]
    entries = [{"symbol": f"made_up.things:{n}", "why": "for a test", "sha256": ""} for n in names]
    path.write_text(yaml.safe_dump({"fingerprint": "", "symbols": entries}))
    compat.rewrite_manifest(path)

    def changed(old: str, new: str) -> list[str]:
        assert old in SOURCE
        module.write_text(SOURCE.replace(old, new))
        return [symbol.partition(":")[2] for symbol in compat.changed_symbols(path)]

    return changed


@pytest.mark.parametrize(
    "old,new",
    [
        ("# larger", "# larger by that"),
        ("A thing.", "Another text"),
        ('"""Its size."""', ""),
        ('"""To be overridden."""', "pass"),
        ("self, by: int = 1", "self,\n             by: int=1,\n        "),
        ('{"a": Thing, "b": 1}', "{\n  \"a\" : Thing,\n  'b': 1,  # one\n}"),
        ("class Thing", "def before():\n    pass\n\nclass Thing"),
    ],
)
def test_what_is_no_code_may_change(manifest_of, old, new):
    """Catches: a start refused for a comment, a docstring or the formatter of another vLLM release."""
    assert manifest_of(old, new) == []


@pytest.mark.parametrize(
    "old,new,named",
    [
        ("int = 3", "int = 4", ["Thing", "Thing.size"]),
        ("by: int = 1", "by: int = 2", ["Thing", "Thing.grow"]),
        ("by=}", "by}", ["Thing", "Thing.grow"]),
        ("    def grow", "    @property\n    def grow", ["Thing", "Thing.grow"]),
        ("hold", "held", ["Thing", "Thing.hold"]),
        ("TABLE", "CHART", ["TABLE"]),
        ('"b": 1', '"b": True', ["TABLE"]),
        (SOURCE, "", ["Thing", "Thing.size", "Thing.grow", "Thing.hold", "TABLE"]),
    ],
)
def test_what_is_code_is_named(manifest_of, old, new, named):
    """Catches: a change of code, of a decorator or of a constant that passes; a symbol that is gone and passes."""
    assert manifest_of(old, new) == named


def test_the_code_of_a_format_is_the_same_in_every_python():
    """Catches: a start refused for the Python that reads the sources. 3.12.1 ends a nested format with an empty text."""
    tree = ast.parse('f"{x:<{y}}"')
    (format_spec,) = [n.format_spec for n in ast.walk(tree) if isinstance(n, ast.FormattedValue) and n.format_spec]
    before = compat.code(tree)
    format_spec.values.append(ast.Constant(""))
    assert compat.code(tree) == before
    assert (
        compat.code(ast.parse('["", u"a"]')) == compat.code(ast.parse("['', 'a']")) != compat.code(ast.parse("['a']"))
    )


def test_the_sources_are_not_imported_and_not_parsed_when_they_are_the_same(monkeypatch):
    """Catches: a check that adds seconds to every start."""
    imported = set(sys.modules)
    monkeypatch.setattr(compat.ast, "parse", lambda source: pytest.fail("parsed"))
    compat.check_manifest()
    assert not {name for name in set(sys.modules) - imported if name.startswith("vllm.")}


def test_a_changed_vllm_starts_where_the_environment_says_so(tmp_path, monkeypatch):
    """Catches: no way on for a release that changed something harmless; one that starts it without a word."""
    manifest = yaml.safe_load(compat.manifest_path().read_text())
    first, second = manifest["symbols"][0], manifest["symbols"][-1]
    first["sha256"] = second["sha256"] = "0" * 64
    path = tmp_path / "manifest.yaml"
    path.write_text(yaml.safe_dump(manifest))
    with pytest.raises(RuntimeError, match="VLLM_SUBSPEC_ALLOW_CHANGED_VLLM=1"):
        compat.check_manifest(path)
    said = []
    monkeypatch.setattr(compat.logger, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setenv("VLLM_SUBSPEC_ALLOW_CHANGED_VLLM", "1")
    compat.check_manifest(path)
    (warning,) = said
    assert first["symbol"] in warning and second["symbol"] in warning
    monkeypatch.setenv("VLLM_SUBSPEC_ALLOW_CHANGED_VLLM", "0")
    with pytest.raises(RuntimeError):
        compat.check_manifest(path)


# Of vLLM's, what the package imports without an entry: what vLLM documents for its users, or what fails with a name of
# its own where it changes.
PUBLIC = {
    "AttentionType", "CompilationMode", "CUDAGraphMode", "EngineArgs", "HAS_TRITON", "ModelConfig", "SamplingParams",
    "VllmConfig", "config", "current_platform", "envs", "hash_factors", "init_logger", "scalar_types",
}  # fmt: skip


def test_the_manifest_names_what_the_package_uses():
    """Catches: a symbol that is imported, subclassed, overridden or patched, whose change would go unnoticed."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_subspec.engine import runner, scheduler, worker

    entries = yaml.safe_load(compat.manifest_path().read_text())["symbols"]
    symbols = {entry["symbol"] for entry in entries}
    known = PUBLIC | {s.partition(":")[2].partition(".")[0] for s in symbols} | {compat.module_of(s) for s in symbols}
    said = " ".join(f"{entry['symbol']} {entry['why']}" for entry in entries)
    package = Path(compat.__file__).parents[1]
    missing = []
    for path in package.rglob("*.py"):
        if path.is_relative_to(package / "tools"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm" and not node.level:
                imported = {a.name: {a.name, f"{node.module}.{a.name}"} for a in node.names}
                missing += [name for name, names in imported.items() if not names & known]
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("replaced", "_wrap"):
                missing += [node.args[1].value] if node.args[1].value not in said else []
    for ours, theirs in ((runner.SubSpecRunner, GPUModelRunner), (worker.SubSpecWorkerMixin, Worker),
                         (worker.SubSpecWorker, Worker), (scheduler.SubSpecScheduler, Scheduler)):  # fmt: skip
        where = f"{theirs.__module__}:{theirs.__name__}"
        overridden = {n for n, v in vars(ours).items() if callable(v) and callable(vars(theirs).get(n))}
        missing += [name for name in overridden if f"{where}.{name}" not in symbols]
    assert missing == []


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
