"""A checkpoint of any byte size that computes exactly what SmolLM2-135M-Instruct does.

    python -m vllm_subspec.tools.padded OUT [--hidden-size 2304] [--intermediate-size 27648] [--num-heads 36]

For measuring real acceptance lengths together with real volumes of weights, without a download. Hidden size, MLP and
heads grow; layers, head size and vocabulary stay. The first coordinates of the residual stream carry the original and
the added ones are always zero:

- The embedding has zeros in the added columns, and what writes the residual stream (o_proj, down_proj) has zeros in
  the added rows. So the tied output layer, too, sees only the original coordinates.
- What reads it (q, k, v, gate, up) has random values in the added rows and columns: the columns meet zeros, and the
  rows make heads and MLP units that o_proj and down_proj read with columns of zeros.
- RMSNorm divides the sum of squares by f times as many coordinates: weights / sqrt(f) and epsilon / f undo it. f is
  a power of 4, so both are powers of two and the scaling is exact in every floating-point type.

Added heads come after the original ones with as many query heads to a key-value head, so the original grouping stays.

The substitutes are those of the original as well: its 576 coordinates are 9 whole quantization groups of 64 (heads
likewise, the MLP's 1536 units are 24), so no group mixes original and added inputs, and a group of zeros quantizes to
zeros. An intermediate size that 64 does not divide would make all groups of down_proj smaller.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .smollm2 import ensure_smollm2

PROJECTIONS = {
    "self_attn.q_proj": ("query", "hidden"), "self_attn.k_proj": ("key", "hidden"),
    "self_attn.v_proj": ("key", "hidden"), "self_attn.o_proj": ("hidden", "query"),
    "mlp.gate_proj": ("mlp", "hidden"), "mlp.up_proj": ("mlp", "hidden"), "mlp.down_proj": ("hidden", "mlp"),
}  # fmt: skip
"""Linear layers of a decoder layer: the `widths` that are their rows (outputs) and columns (inputs)."""

NORMS = ("input_layernorm", "post_attention_layernorm")

SHARD_BYTES = 2 * 10**9

BLOCK = 2**24 - 3
"""Random values drawn for a checkpoint. Prime, so that no row repeats when the block is tiled over a matrix."""


def widths(config: dict) -> dict[str, int]:
    """Sizes of the spaces that the linear layers map between."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_size = config.get("head_dim") or hidden // heads
    return {
        "hidden": hidden,
        "query": heads * head_size,
        "key": (config.get("num_key_value_heads") or heads) * head_size,
        "mlp": config["intermediate_size"],
    }


def decoder_bytes(checkpoint: Path) -> int:
    """Bytes of the decoder layers' weights: everything but the embedding and the last norm."""
    config = json.loads((checkpoint / "config.json").read_text())
    width = widths(config)
    layer = sum(width[rows] * width[columns] for rows, columns in PROJECTIONS.values())
    layer += len(NORMS) * width["hidden"]
    return config["num_hidden_layers"] * layer * getattr(torch, config["dtype"]).itemsize


def padded_config(config: dict, hidden_size: int, intermediate_size: int, num_heads: int, dtype: str) -> dict:
    """The configuration of the padded checkpoint.

    Raises:
        ValueError: the sizes do not allow an exact copy of the function, or the source is not of the supported kind
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    group = heads // (config.get("num_key_value_heads") or heads)
    biased = config.get("attention_bias") or config.get("mlp_bias")
    if config["model_type"] != "llama" or not config.get("tie_word_embeddings") or biased:
        raise ValueError("the source must be a Llama checkpoint with tied embeddings and no biases")
    if hidden_size not in (hidden * 4**i for i in range(8)):
        raise ValueError(
            f"the hidden size must be {hidden} times a power of 4 ({hidden}, {4 * hidden}, {16 * hidden}), or its "
            f"norms would not be exact: {hidden_size} is not"
        )
    if intermediate_size < (least := config["intermediate_size"]):
        raise ValueError(f"the intermediate size must be at least the source's {least}, not {intermediate_size}")
    if num_heads < heads or num_heads % group or hidden_size % num_heads:
        raise ValueError(
            f"the number of heads must be at least the source's {heads}, a multiple of {group} (the query heads of a "
            f"key-value head) and a divisor of the hidden size {hidden_size}: {num_heads} is not"
        )
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"the dtype must be bfloat16 or float32, not {dtype}")
    new = {key: value for key, value in config.items() if key != "torch_dtype"}
    return new | {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // group,
        "head_dim": widths(config)["query"] // heads,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6) * hidden / hidden_size,
        "dtype": dtype,
    }


def padded_tensors(
    weights: safe_open, old: dict, new: dict, seed: int, device: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the padded checkpoint, on the CPU.

    Args:
        weights: the source's tensors
        old, new: configurations of the source and of the result
        device: where the tensors are made
    """
    width, dtype = widths(new), getattr(torch, new["dtype"])
    shapes = {name: (width[rows], width[columns]) for name, (rows, columns) in PROJECTIONS.items()}
    shrink = math.isqrt(new["hidden_size"] // old["hidden_size"])
    generator = torch.Generator(device).manual_seed(seed)
    # torch draws normals on one core: billions of them take minutes. So one block is drawn, and each matrix gets it
    # from another place on, as often as it fits, in the matrix's own scale.
    size = min(BLOCK, max(map(math.prod, shapes.values())))
    block = torch.randn(size, generator=generator, device=device).to(dtype).repeat(2)  # one to begin anywhere in

    def random(shape: tuple[int, int], std: float) -> torch.Tensor:
        start = int(torch.randint(size, (), generator=generator, device=device))
        values = block[start : start + min(size, math.prod(shape))] * std
        out = torch.empty(shape, dtype=dtype, device=device)
        for part in out.view(-1).split(size):
            part.copy_(values[: part.numel()])
        return out

    def norm(name: str) -> tuple[str, torch.Tensor]:
        out = torch.ones(width["hidden"], dtype=dtype)
        original = weights.get_tensor(name)
        out[: original.shape[0]] = original / shrink
        return name, out

    def matrix(name: str, out: torch.Tensor, original: torch.Tensor) -> tuple[str, torch.Tensor]:
        rows, columns = original.shape
        out[:rows, :columns] = original
        return name, out.cpu()

    name = "model.embed_tokens.weight"
    embedding = weights.get_tensor(name)
    yield matrix(name, torch.zeros(embedding.shape[0], width["hidden"], dtype=dtype, device=device), embedding)
    for layer in range(new["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for module in NORMS:
            yield norm(f"{prefix}{module}.weight")
        for module, shape in shapes.items():
            name = f"{prefix}{module}.weight"
            original = weights.get_tensor(name)
            if PROJECTIONS[module][0] == "hidden":
                yield matrix(name, torch.zeros(shape, dtype=dtype, device=device), original)
            else:
                yield matrix(name, random(shape, float(original.float().std())), original)
    yield norm("model.norm.weight")


def shards(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Successive tensors, by name, of at most `SHARD_BYTES` together (or one that is larger)."""
    shard, held = {}, 0
    for name, tensor in tensors:
        if shard and held + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor
        held += tensor.nbytes
    yield shard


def make_padded(
    out: Path,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    dtype: str = "bfloat16",
    source: Path | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Path:
    """Write a checkpoint of these sizes with the source's function. Holds one shard (2 GB) in memory.

    Args:
        out: a directory that is empty or does not exist
        hidden_size: the source's times a power of 4
        num_heads: query heads; key-value heads follow in the source's ratio
        dtype: "bfloat16" or "float32"
        source: a Llama checkpoint in one safetensors file, with tied embeddings; default: SmolLM2-135M-Instruct
        seed: of the random weights; they are reproducible on a device of one kind
        device: where the tensors are made: "cpu" or "cuda"

    Returns:
        ``out``

    Raises:
        ValueError: an argument does not fit
    """
    out = Path(out)
    source = ensure_smollm2() if source is None else Path(source)
    old = json.loads((source / "config.json").read_text())
    new = padded_config(old, hidden_size, intermediate_size, num_heads, dtype)
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"there is no device {device} here")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory")

    weight_map, total = {}, 0
    with safe_open(source / "model.safetensors", "pt") as weights:
        out.mkdir(parents=True, exist_ok=True)
        for number, shard in enumerate(shards(padded_tensors(weights, old, new, seed, device)), start=1):
            file = f"model-{number:05}.safetensors"
            save_file(shard, out / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            total += sum(tensor.nbytes for tensor in shard.values())
            shard.clear()  # before the next one is made
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and not file.name.endswith(".index.json"):
            shutil.copy(file, out)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(new, indent=1))
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m vllm_subspec.tools.padded", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden-size", type=int, default=2304)
    parser.add_argument("--intermediate-size", type=int, default=27648)
    parser.add_argument("--num-heads", type=int, default=36)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args(argv)
    try:
        path = make_padded(args.out, args.hidden_size, args.intermediate_size, args.num_heads, args.dtype)
    except (FileNotFoundError, ValueError) as error:
        print(f"padded: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {decoder_bytes(path)} bytes of decoder weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
