"""Engine processes, one at a time: start, read what they measure, stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...cpu.platform import MARK, RUNNER

INTERPRET = "TRITON_INTERPRET"


def environment(subspec: bool, cpu: bool) -> dict[str, str]:
    """The environment of an engine process.

    On a CPU build an engine with subspec, inside its process, needs two variables from the start (see
    `vllm_subspec.cpu.platform`); any other engine must have none of that, or it would not be plain vLLM.
    """
    env = dict(os.environ)
    if cpu:
        for name in (MARK, RUNNER, INTERPRET):
            env.pop(name, None)
        if subspec:
            env[MARK] = env[INTERPRET] = "1"
    return env


def run_engine(job: dict[str, Any], log: Path, cpu: bool, timeout: float | None) -> Iterator[dict[str, Any]]:
    """Measure a job in a fresh process; yields its events (see `engine`) as they come.

    Args:
        log: gets what the process prints
        timeout: seconds; then the process is stopped and the last event is ``failed``
    """
    subspec = (job["speculative_config"] or {}).get("method") == "subspec"
    read, write = os.pipe()
    with open(log, "a") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_subspec.tools.bench.engine", str(write)],
            stdin=subprocess.PIPE, stdout=printed, stderr=subprocess.STDOUT, text=True, pass_fds=[write],
            env=environment(subspec, cpu),
        )  # fmt: skip
    os.close(write)
    late = threading.Event()
    timer = threading.Timer(timeout or threading.TIMEOUT_MAX, lambda: (late.set(), process.kill()))
    timer.daemon = True
    timer.start()
    ended = False
    try:
        with os.fdopen(read) as lines:
            with suppress(BrokenPipeError), process.stdin as asked:  # a process that died at once says so below
                asked.write(json.dumps(job))
            for line in lines:
                if line.endswith("\n"):  # a process that is killed may leave half a line
                    event = json.loads(line)
                    ended = event["event"] in ("done", "failed")
                    yield event
        if late.is_set():
            yield {"event": "failed", "error": f"stopped after {timeout:g} s (--timeout)"}
        elif not ended:
            yield {"event": "failed", "error": f"the engine process ended with status {process.wait()}; see {log}"}
    finally:
        timer.cancel()
        stop(process)


def stop(process: subprocess.Popen) -> None:
    """End a process, gently first."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
