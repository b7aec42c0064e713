"""Padded checkpoints: the source's function in another size. The source is tiny and random unless a test says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from vllm_subspec.tools import padded
from vllm_subspec.tools.padded import decoder_bytes, main, make_padded
from vllm_subspec.weights.quantize import quantize

HIDDEN, MLP, HEADS, KV_HEADS, HEAD, LAYERS, VOCAB = 64, 128, 4, 2, 32, 2, 320
SIZES = (256, 448, 8)
"""Hidden, MLP, heads"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A random Llama: heads wider than the hidden size, norms other than ones, epsilon counts beside embeddings"""
    out = tmp_path_factory.mktemp("source")
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=MLP, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=HEAD, num_hidden_layers=LAYERS, vocab_size=VOCAB, rms_norm_eps=1e-5, rope_theta=5000.0,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 2.0)
        elif "embed" not in name:
            parameter.data.normal_(std=0.12)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (out / name).write_text(name)
    return out


def load(path: Path):
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}


@torch.no_grad()
def assert_same_function(expected, got, ids: torch.Tensor, new_tokens: int):
    a, b = expected(ids).logits, got(ids).logits
    assert (a - b).abs().max() < 1e-5 * a.abs().max()
    greedy = dict(do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
    torch.testing.assert_close(got.generate(ids, **greedy), expected.generate(ids, **greedy), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [SIZES, (1024, 1024, 16), (64, 192, 4), (256, 128, 4), (64, 128, 8), (64, 128, 4)])
def test_the_function_is_the_sources(source, tmp_path, sizes, dtype):
    """Catches: an added head, unit or coordinate that acts, wrong norm weights or epsilon, heads in other groups."""
    got = load(make_padded(tmp_path, *sizes, dtype=dtype, source=source))
    expected = load(source)
    for parameter in expected.parameters():  # and no buffers: rotary frequencies stay float32
        parameter.data = parameter.data.to(getattr(torch, dtype)).float()
    ids = torch.randint(3, VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    assert_same_function(expected, got, ids, 16)


def test_added_weights_are_random_where_they_cannot_act_and_zero_where_they_could(source, tmp_path):
    """Catches: zeros in place of random weights, an unlike scale, layers or kinds alike, a nonzero that could act."""
    out = make_padded(tmp_path, *SIZES, dtype="float32", source=source)
    old, new = tensors_of(source), tensors_of(out)
    assert set(new) == set(old)
    seen = []
    for name, original in old.items():
        weight = new[name]
        if original.ndim == 1:
            assert torch.equal(weight[:HIDDEN], original / 2) and weight.isfinite().all()
            continue
        rows, columns = original.shape
        assert torch.equal(weight[:rows, :columns], original)
        added = torch.cat([weight[:rows, columns:].flatten(), weight[rows:].flatten()])
        assert added.numel() > 0
        if any(kind in name for kind in ("embed", "o_proj", "down_proj")):
            assert not added.any()
        else:
            assert added.count_nonzero() > 0.999 * added.numel()
            assert abs(added.std() - original.std()) < 0.05 * original.std() and abs(added.mean()) < 0.05 * added.std()
            assert weight.unique(dim=0).shape == weight.shape
            seen.append(weight[rows] / original.std())
    seen = torch.stack(seen)
    similar = (seen @ seen.T / seen.shape[1]).fill_diagonal_(0).abs().max()
    assert len(seen) == 5 * LAYERS and similar < 0.4


def test_matrices_larger_than_the_random_block_are_filled(source, tmp_path, monkeypatch):
    """Catches: memory left as it was behind the first block, a block that repeats row by row."""
    monkeypatch.setattr(padded, "BLOCK", 1021)
    new = tensors_of(make_padded(tmp_path, *SIZES, dtype="float32", source=source))
    gate = new["model.layers.1.mlp.gate_proj.weight"]
    assert gate[MLP:].std(dim=1).sub(0.12).abs().max() < 0.03
    assert gate.unique(dim=0).shape == gate.shape


def test_substitutes_are_the_sources(source, tmp_path):
    """Catches: a 4-bit group with original and added inputs, zeros that 4 bits make nonzero. Groups of 64."""
    old, new = tensors_of(source), tensors_of(make_padded(tmp_path, *SIZES, dtype="float32", source=source))
    for name in (f"model.layers.0.{module}.weight" for module in padded.PROJECTIONS):
        expected, got = quantize(old[name], 4, 64).dequantize(), quantize(new[name], 4, 64).dequantize()
        rows, columns = expected.shape
        assert got.isfinite().all()
        # HQQ stops its iterations on the error of the whole weight, so a few codes may differ: not more.
        assert ((got[:rows, :columns] - expected).abs() > 1e-6).float().mean() < 0.02
        if padded.PROJECTIONS[name[len("model.layers.0.") : -len(".weight")]][0] == "hidden":
            assert not got[rows:].any() and not got[:, columns:].any()


def test_weights_are_reproducible(source, tmp_path):
    """Catches: a generator that ignores its seed, or global state that the result depends on."""
    a, b, c = (
        tensors_of(make_padded(tmp_path / str(i), *SIZES, source=source, seed=seed)) for i, seed in enumerate([7, 7, 8])
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.layers.0.mlp.up_proj.weight"], c["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files(source, tmp_path, monkeypatch, dtype):
    """Catches: an index that points at the wrong shard, a shard too large, a wrong byte count, files not copied."""
    monkeypatch.setattr(padded, "SHARD_BYTES", 500_000)
    out = make_padded(tmp_path / "new" / "checkpoint", *SIZES, dtype=dtype, source=source)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1 and files == {file.name for file in out.glob("*.safetensors")}
    total = 0
    for file in files:
        with safe_open(out / file, "pt") as shard:
            assert set(shard.keys()) == {name for name, where in index["weight_map"].items() if where == file}
            sizes = [shard.get_tensor(name).nbytes for name in shard.keys()]
        assert sum(sizes) <= 500_000 or len(sizes) == 1
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total

    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == getattr(torch, dtype)
    assert decoder_bytes(out) == sum(p.nbytes for name, p in model.named_parameters() if ".layers." in name)
    assert decoder_bytes(out) > 4 * LAYERS * (256 * 448 * 3 + 256 * HEAD * (8 + 4) * 2) * model.dtype.itemsize // 4
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_text() == (source / name).read_text()


@pytest.mark.parametrize(
    "change,message",
    [
        ({"hidden_size": 128}, "power of 4"),
        ({"hidden_size": 300}, "power of 4"),
        ({"hidden_size": 16}, "power of 4"),
        ({"hidden_size": -256}, "power of 4"),
        ({"intermediate_size": 127}, "at least the source's 128"),
        ({"num_heads": 2}, "at least the source's 4"),
        ({"num_heads": 7}, "a multiple of 2"),
        ({"num_heads": 12}, "a divisor of the hidden size"),
        ({"dtype": "float16"}, "bfloat16 or float32"),
        ({"device": "cuda"}, "no device cuda"),
    ],
)
def test_bad_arguments(source, tmp_path, monkeypatch, change, message):
    """Catches: a checkpoint that silently is another function, or one that no framework loads."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = {"hidden_size": 256, "intermediate_size": 448, "num_heads": 8, "source": source}
    with pytest.raises(ValueError, match=message):
        make_padded(tmp_path / "out", **{**arguments, **change})
    assert not (tmp_path / "out").exists()


def test_other_files_are_left_alone(source, tmp_path):
    """Catches: a checkpoint written over another one, the source above all."""
    (tmp_path / "file").write_text("kept")
    for out in (source, tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="not an empty directory"):
            make_padded(out, *SIZES, source=source)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("change", [{"tie_word_embeddings": False}, {"model_type": "qwen3"}, {"attention_bias": True}])
def test_other_sources_are_refused(source, tmp_path, change):
    """Catches: weights of the source that would be left out."""
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match="tied embeddings and no biases"):
        make_padded(tmp_path / "out", *SIZES, source=tmp_path)


def test_a_head_size_left_to_its_default_is_kept(source):
    """Catches: hidden size / heads read anew from the padded sizes."""
    config = json.loads((source / "config.json").read_text())
    for absent in ({"head_dim": None}, {}):
        given = {key: value for key, value in config.items() if key != "head_dim"} | absent
        assert padded.padded_config(given, 256, 448, 8, "float32")["head_dim"] == HIDDEN // HEADS


def test_command(source, tmp_path, monkeypatch, capsys):
    """Catches: options that do not reach the checkpoint, a traceback or a zero exit status for a bad one."""
    monkeypatch.setenv("VLLM_SUBSPEC_CACHE", str(tmp_path))
    (tmp_path / "SmolLM2-135M-Instruct").symlink_to(source)
    out = tmp_path / "out"
    sizes = ["--hidden-size", "256", "--intermediate-size", "448", "--num-heads", "8", "--dtype", "float32"]
    assert main([str(out), *sizes]) == 0
    assert capsys.readouterr().out == f"{out}: {decoder_bytes(out)} bytes of decoder weights\n"
    config = transformers.AutoConfig.from_pretrained(out)
    assert (config.hidden_size, config.intermediate_size, config.num_attention_heads) == SIZES
    assert (config.num_key_value_heads, config.head_dim, config.dtype) == (4, HEAD, torch.float32)
    assert main([str(tmp_path / "bad"), *sizes, "--hidden-size", "128"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "power of 4" in captured.err


@pytest.mark.slow
def test_smollm2_keeps_its_function(smollm2, tmp_path):
    """Catches: what a tiny model hides, as a real tokenizer, large activations and 30 layers. 2.4 GB of disk."""
    out = make_padded(tmp_path, 2304, 1600, 12, dtype="float32", source=Path(smollm2))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "Give three tips for staying healthy."}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    assert_same_function(load(Path(smollm2)), load(out), ids, 16)
