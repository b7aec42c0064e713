"""Without the flag, an installation of vLLM is what it is without the plugin."""

from __future__ import annotations

import os
import subprocess
import sys

import engine
from test_lossless import random_requests, tokens

from vllm_subspec.cpu.platform import is_cpu_build


def test_plain_engines_before_and_after_one_with_subspec(tiny_checkpoints):
    """Catches: a plain engine on another runner, worker or attention because the plugin is there or was used.

    Separate engine processes, no variable set: the way users start engines. All three in one calling process.
    """
    job = {"model": tiny_checkpoints["llama"], "batches": [[r] for r in random_requests(1, [9, 40], 16)]}
    spec = {"tree_width": 2, "tree_depth": 4}
    before, ours, after = engine.run([job, {**job, "spec": spec}, job])
    assert tokens(before) == tokens(ours) == tokens(after)
    assert any(r["tree_size"] > 1 for r in ours["rounds"])
    on_cpu = is_cpu_build()
    assert (before["v2"], ours["v2"], after["v2"]) == ((False, True, False) if on_cpu else (True, True, True))


def test_the_same_classes_run_with_and_without_the_plugin(tiny_checkpoints):
    """Catches: anything of ours in a plain engine: same worker, runner and attention classes, same environment."""
    job = {"model": tiny_checkpoints["llama"], "batches": [], "probe": "classes"}
    (with_plugin,) = engine.run([job], in_process=True)
    os.environ["VLLM_PLUGINS"] = ""  # vLLM's own switch: load no plugin
    try:
        (without,) = engine.run([job], in_process=True)
    finally:
        del os.environ["VLLM_PLUGINS"]
    assert with_plugin["probe"] == without["probe"]
    assert not without["probe"]["speculator"]


def test_loading_the_plugin_imports_no_engine_code():
    """Catches: start-up time and side effects for engines without the flag."""
    code = (
        "import sys, vllm_subspec.engine.plugin as p; p.register();"
        "ours = sorted(m for m in sys.modules if m.startswith('vllm_subspec'));"
        "light = ('cpu', 'cpu.platform', 'engine', 'engine.compat', 'engine.plugin', 'patching', 'versions');"
        "light = ['vllm_subspec'] + ['vllm_subspec.' + m for m in light];"
        "assert ours == light, ours;"
        "assert 'vllm.v1.worker.gpu.model_runner' not in sys.modules"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("SUBSPEC_ON_CPU", "TRITON_INTERPRET")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
