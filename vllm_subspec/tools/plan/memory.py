"""GPU memory of a placement of the decoder layers, item by item, in bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...weights.quantize import MAX_WEIGHTS
from ...weights.storage import kernel_shape, stored_bytes
from ..sizes import MIB, gib
from .model import Layer, Model

BLOCK_SIZE = 16
"""Tokens of a KV cache block, vLLM's default on CUDA"""
CUDA_CONTEXT = 518 * MIB
"""CUDA context of a process, in no share that vLLM counts: its first reading comes after. This and the next three were
measured on an H200 (driver 580, torch 2.11) with Qwen2.5-7B's shapes; other cards and drivers differ by tens of MiB."""
LIBRARIES = 232 * MIB
"""NCCL, cuBLAS and loaded kernels, which vLLM counts as used"""
ALLOCATOR = 176 * MIB
"""What torch's allocator holds and nothing uses when vLLM looks, and the runner's own buffers"""
CUDA_GRAPHS = 72 * MIB
"""The draft step's graph with its pool, and workspaces. vLLM sizes its KV cache before."""
TENSOR_SLACK = MIB // 4
"""Torch gives a tensor of some MiB up to 1 MiB more than it asks for: 0.26 MiB on average of a substitute's three"""
TREE_ATTENTION = 264 * 128 * 4
"""Partial results of tree attention for each dimension of a head: at most one float32 tile of 128 rows for each of
`tree_kernel.PROGRAMS` programs."""
ROWS_AT_ONCE = 64
"""As in `vllm_subspec.round.verify`, which would import vLLM"""
HQQ_BYTES = 40
"""Bytes for each weight that HQQ works on: about ten float32 copies (see `substitute.quantize`)"""


@dataclass(frozen=True)
class Run:
    """What an engine is asked to do, as far as memory depends on it. One request at a time."""

    itemsize: int = 2
    """Bytes of a weight: 2 for bfloat16 and float16, 4 for float32"""
    context: int = 4096
    """max_model_len"""
    chunk: int = 512
    """max_num_batched_tokens: the most rows of a prefill step"""
    tree_width: int = 6
    tree_depth: int = 48
    group_size: int = 64
    """Weights of a substitute that share a scale and a zero-point"""
    substitute_all: bool = False
    """Substitutes for the resident layers as well: the draft reads a quarter of their bytes"""

    @property
    def tree_rows(self) -> int:
        """Rows of a verification: the root and width x depth nodes"""
        return 1 + self.tree_width * self.tree_depth


@dataclass(frozen=True)
class Memory:
    """Bytes by item; `total` is the most that is in use at any time."""

    embedding: int
    head: int
    other_weights: int
    resident_layers: int
    substitutes: int
    prefetch_buffers: int
    kv_cache: int
    activations: int
    """Of the largest prefill chunk, or the logits of a whole tree, if those are more: never both at a time"""
    tree: int
    libraries: int
    cuda_graphs: int
    cuda_context: int
    loading: int
    """What making the last substitute takes, above what serving uses later"""

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def plain_memory(model: Model, run: Run) -> Memory:
    """Memory of plain vLLM with every layer resident: no substitutes, no buffers, no tree, logits of one row."""
    return _memory(model, run, offloaded=(), step=0, rows=1)


def offloaded_memory(model: Model, run: Run, offloaded: tuple[int, ...], step: int) -> Memory:
    """Memory of subspec with some layers offloaded by vLLM's prefetch backend.

    Args:
        offloaded: indices of the layers, at least one
        step: prefetch_step, the slots that each kind of offloaded parameter has
    """
    return _memory(model, run, offloaded, step, run.tree_rows)


def _memory(model: Model, run: Run, offloaded: tuple[int, ...], step: int, rows: int) -> Memory:
    speculates = rows > 1
    streamed = [model.layers[i] for i in offloaded]
    substituted = model.layers if run.substitute_all and streamed else streamed
    weights = {
        "embedding": model.embedding * run.itemsize,
        "head": model.head * run.itemsize,
        "other_weights": model.others * run.itemsize
        + model.rotary_tables * model.max_positions * model.head_size * run.itemsize,
        "resident_layers": sum(layer.parameters for layer in model.layers) * run.itemsize
        - sum(layer.parameters for layer in streamed) * run.itemsize,
        "substitutes": sum(substitute_bytes(layer, run) for layer in substituted),
        "libraries": LIBRARIES + ALLOCATOR,
        "cuda_context": CUDA_CONTEXT,
    }
    serving = {
        "prefetch_buffers": prefetch_bytes(streamed, step, run.itemsize),
        "kv_cache": kv_bytes(model, run),
        "activations": max(activation_bytes(model, run), logits_bytes(model, run, rows)),
        "tree": tree_bytes(model, run) if speculates else 0,
        "cuda_graphs": CUDA_GRAPHS,
    }
    loading = max((quantization_bytes(layer, run) for layer in substituted), default=0)
    return Memory(**weights, **serving, loading=max(0, loading - sum(serving.values())))


def substitute_bytes(layer: Layer, run: Run) -> int:
    """A layer's substitutes, and the resident copies of its norms and biases (`weights.draft`).

    At groups of 64 these have 4.3125 bits a weight where Marlin takes a weight as it is (see `weights.storage`).
    """
    linears = (_substitute_bytes(*shape, run, run.itemsize) for shape in layer.linears.values())
    return layer.others * run.itemsize + sum(linears)


def _substitute_bytes(outputs: int, inputs: int, run: Run, itemsize: int) -> int:
    slack = 3 * TENSOR_SLACK if outputs * inputs >= 2 * MIB else 0
    return stored_bytes(outputs, inputs, run.group_size, itemsize) + slack


def without_kernel(layers: Iterable[Layer], run: Run) -> str | None:
    """One sentence about the substitutes that no 4-bit kernel multiplies by, and what that costs; None if none is."""
    linears = [(name, *shape) for layer in layers for name, shape in layer.linears.items()]
    if run.itemsize != 2 and linears:
        dense, packed = (
            sum(_substitute_bytes(*shape, run, size) for _, *shape in linears) for size in (run.itemsize, 2)
        )
        return (
            f"4-bit kernels compute in 16 bits, not in float32: dense substitutes take {gib(dense)} instead of "
            f"{gib(packed)}"
        )
    kinds = {
        f"{name.removesuffix('.weight')} {outputs} x {inputs}": None
        for name, outputs, inputs in linears
        if kernel_shape(outputs, inputs, run.group_size, "cuda") is None
    }
    if not kinds:
        return None
    return (
        f"the 4-bit kernel takes {', '.join(kinds)} only with many zeros added: these substitutes are dequantized each "
        "time they are used, which is slow"
    )


def prefetch_bytes(streamed: list[Layer], step: int, itemsize: int) -> int:
    """vLLM's StaticBufferPool: ``step`` slots of each distinct (parameter name, shape) of the offloaded layers."""
    linears = {(name, shape) for layer in streamed for name, shape in layer.linears.items()}
    others = max((layer.others for layer in streamed), default=0)
    return step * itemsize * (sum(outputs * inputs for _, (outputs, inputs) in linears) + others)


def kv_bytes(model: Model, run: Run) -> int:
    """Keys and values of ``context`` tokens in every layer: 2 x kv heads x head size x itemsize a token.

    In blocks of 16, with one more for a window that starts inside a block and vLLM's null block. An upper bound for
    sliding windows: they are counted as if they kept the whole context. Tree nodes lie within max_model_len.
    """
    blocks = -(-run.context // BLOCK_SIZE) + 2
    return blocks * BLOCK_SIZE * len(model.layers) * 2 * model.num_kv_heads * model.head_size * run.itemsize


def activation_bytes(model: Model, run: Run) -> int:
    """The peak inside one layer, for the largest prefill chunk (at least the tree's rows).

    A row holds four hidden states (residual, normed, input, output), two more in float32 inside a norm, and in the
    MLP the widest output (gate and up) with the widest input (of down).
    """
    widest = max(
        max(outputs for outputs, _ in layer.linears.values()) + max(inputs for _, inputs in layer.linears.values())
        for layer in model.layers
    )
    return max(run.chunk, run.tree_rows) * (run.itemsize * (4 * model.hidden_size + widest) + 4 * 2 * model.hidden_size)


def logits_bytes(model: Model, run: Run, rows: int) -> int:
    """Logits of the rows that are verified, in the model's dtype, and the float32 copies that vLLM's sampler makes of
    `ROWS_AT_ONCE` of them at a time, two of each. A draft pass has k rows: its dtype and three in float32."""
    drafted = run.tree_width if rows > 1 else 0
    sampled = 2 * 4 * min(rows, ROWS_AT_ONCE)
    return model.vocab_size * (rows * run.itemsize + sampled + drafted * (run.itemsize + 3 * 4))


def tree_bytes(model: Model, run: Run) -> int:
    """The tree of n nodes: about four n x n byte masks (ancestors, the rows of a pass, two while it is accepted), five
    int64 a node, and the workspace of tree attention."""
    n = run.tree_rows
    return 4 * n * n + 5 * 8 * n + TREE_ATTENTION * model.head_size


def quantization_bytes(layer: Layer, run: Run) -> int:
    """The most that making one substitute takes, for the layer's largest linear of n weights.

    While HQQ runs: the weight, its codes in bytes, HQQ's own copies of the rows under work. Packing, which comes
    after, takes less: the codes, and three times half a byte a weight while Marlin turns and repacks them.
    """
    n = max(outputs * inputs for outputs, inputs in layer.linears.values())
    return (run.itemsize + 1) * n + HQQ_BYTES * min(n, MAX_WEIGHTS)
