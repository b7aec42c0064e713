"""Set-up that every test shares. Engines run in processes of their own (see engine.py), one at a time."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

from engine import has_cuda  # noqa: E402

if not has_cuda():  # unit tests run Triton kernels, vLLM's and ours, interpreted
    os.environ["SUBSPEC_ON_CPU"] = os.environ["TRITON_INTERPRET"] = "1"


FIRST = (
    "test_gpu", "test_confidence", "test_sharing", "test_compiled", "test_flag_off", "test_lossless", "test_fuzz",
    "test_server",
)  # fmt: skip
"""Files of few tests that take minutes: begun first, so that files side by side end together"""


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.stem not in FIRST)
    for item in items:
        if item.get_closest_marker("gpu") and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        if item.get_closest_marker("slow") and "slow" not in (config.option.markexpr or ""):
            item.add_marker(pytest.mark.skip(reason="run with -m slow"))


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Path of SmolLM2-135M-Instruct, converted on first use."""
    from vllm_subspec.tools.smollm2 import ensure_smollm2

    return str(ensure_smollm2())


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory) -> dict[str, str]:
    """Random checkpoints of a few thousand parameters, by family (see tiny.py)."""
    import tiny

    return tiny.make_all(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def checkpoint(tmp_path):
    """A directory with nothing but a config.json, of Qwen2.5-7B unless another is given."""
    from published import QWEN2_7B

    def write(config: dict | str = QWEN2_7B, name: str = "model") -> str:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return str(directory)

    return write


@pytest.fixture(scope="session")
def vllm_parameters():
    """vLLM's parameter classes ask for the tensor-parallel rank: a group of one process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.utils.network_utils import get_open_port

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_stray_engines():
    """No process that the tests started, recognized by a mark in its environment, may outlive them."""
    mark = f"SUBSPEC_TEST_RUN={os.getpid()}"
    os.environ.update([mark.split("=")])
    yield

    def left() -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_text(errors="replace").split("\0"):
                    command = (process / "cmdline").read_text().replace("\0", " ")
                    if "multiprocessing.resource_tracker" not in command:  # Python's own, ends with this process
                        found.append(command)
            except OSError:
                continue  # ended meanwhile, or another user's
        return found

    deadline = time.time() + 20
    while left() and time.time() < deadline:
        time.sleep(0.5)
    assert not left(), f"processes left behind: {left()}"
