"""vLLM's OpenAI server, started as a user starts it, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import engine
import openai


def processes_of(group: int) -> list[str]:
    """Command lines of the processes in a process group."""
    out = subprocess.run(["ps", "-eo", "pgid=,args="], capture_output=True, text=True).stdout
    return [line for line in out.splitlines() if line.split(None, 1)[0] == str(group)]


@contextmanager
def serve(model: str, log: Path, spec: dict | None, *options: str) -> Iterator[tuple[openai.OpenAI, subprocess.Popen]]:
    """A server of ``model`` under the name ``m``, float32, with subspec or (``spec`` None) plain.

    Yields:
        a client, and the process, which leads a process group of its own.
    """
    from vllm.utils.network_utils import get_open_port

    port = get_open_port()
    env = {**engine.environment(in_process=False, subspec_env=False), "VLLM_LOGGING_LEVEL": "INFO"}  # as a user's
    if spec is None:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    else:
        config = json.dumps({"method": "subspec", **spec})
        command = [sys.executable, "-m", "vllm_subspec.tools.cli", "serve", model, "--speculative-config", config]
    command += ["--served-model-name", "m", "--port", str(port), "--dtype", "float32", "--enforce-eager", *options]
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)
    try:
        deadline = time.time() + 300
        while True:
            try:
                client.models.list()
                break
            except openai.APIConnectionError:
                if process.poll() is not None or time.time() > deadline:
                    raise RuntimeError(f"the server did not start:\n{log.read_text()[-6000:]}") from None
                time.sleep(1)
        yield client, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
