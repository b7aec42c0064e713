"""Compile the tree attention kernel for a GPU that is not here; prints the most bytes of shared memory that it takes.

    python tests/other_gpus.py CAPABILITY       e.g. 86, an RTX 30

To be run in a process of its own: Triton's driver is one that only names the GPU.
"""

from __future__ import annotations

import os
import sys
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from vllm_subspec.round.attention import tree_kernel  # noqa: E402

NODES = 289  # rows of a verification: its tiles are the largest
SIZES = {64: (9, 3), 96: (32, 32), 128: (28, 4), 256: (8, 4)}
"""Heads and KV heads by head size"""


class Driver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int):
        self.capability = capability

    def is_active(self) -> bool:
        return True

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def main(capability: int) -> None:
    triton.runtime.driver.set_active(Driver(capability))
    taken = []

    def compile_only(kernel, grid):
        return lambda *args, **kwargs: taken.append(kernel.run(*args, grid=grid, warmup=True, **kwargs).metadata.shared)

    dtype = torch.float16 if capability < 80 else torch.bfloat16
    with (
        mock.patch.object(JITFunction, "__getitem__", compile_only),
        mock.patch.object(tree_kernel, "is_turing", lambda device: capability < 80),
    ):
        for size, (heads, kv_heads) in SIZES.items():
            query, positions = torch.empty(NODES, heads, size, dtype=dtype), torch.zeros(NODES, dtype=torch.int64)
            tree_kernel.paged_tree_attention(
                query, torch.empty(8, kv_heads, 16, 2 * size, dtype=dtype), torch.zeros(8, dtype=torch.int32),
                torch.tensor(5), torch.zeros(NODES, NODES, dtype=torch.uint8), positions, positions,
                torch.empty_like(query), size**-0.5, max_keys=2048,
            )  # fmt: skip
    print(max(taken))


if __name__ == "__main__":
    main(int(sys.argv[1]))
