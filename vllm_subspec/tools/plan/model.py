"""What a model is made of: exact parameter shapes from its config.json, without its weights."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Layer:
    """One decoder layer, with its linears fused as vLLM fuses them (q, k, v; gate, up)."""

    linears: dict[str, tuple[int, int]]
    """Name -> (outputs, inputs)"""
    others: int
    """Parameters that are no linear weight: norms and biases"""

    @property
    def linear_parameters(self) -> int:
        return sum(outputs * inputs for outputs, inputs in self.linears.values())

    @property
    def parameters(self) -> int:
        return self.linear_parameters + self.others


@dataclass(frozen=True)
class Model:
    """Counts are parameters, not bytes."""

    name: str
    layers: tuple[Layer, ...]
    embedding: int
    head: int
    """0 if it is tied to the embedding"""
    others: int
    """What is in no layer: the final norm, position embeddings"""
    hidden_size: int
    vocab_size: int
    num_kv_heads: int
    head_size: int
    rotary_tables: int
    """Tables of cosines and sines: one, or two where sliding layers rotate in a way of their own"""
    max_positions: int
    scaled_rope: bool
    """The checkpoint may be run past max_positions"""

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers) + self.embedding + self.head + self.others


def load_model(
    model: str, revision: str | None = None, overrides: dict | None = None, token: bool | str | None = None
) -> Model:
    """Sizes of a checkpoint.

    Args:
        model: a directory with a config.json, or a hub id, of which config.json alone is fetched
        revision, token: for the hub
        overrides: keys of config.json with other values (vLLM's ``--hf-overrides``)

    Raises:
        FileNotFoundError: no such directory or hub model, or it has no config.json.
        ValueError: not a dense decoder that subspec serves; the sentence says what it is.
    """
    path = _config_path(model, revision, token)
    try:
        given = json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"the config.json of {model} is not JSON") from None
    if not isinstance(given, dict) or not isinstance(given.get("model_type"), str):
        raise ValueError(f"the config.json of {model} has no model_type, so it does not say what the model is")
    return model_from_config({**given, **(overrides or {})}, model)


def _config_path(model: str, revision: str | None, token: bool | str | None) -> Path:
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise FileNotFoundError(f"{model} has no config.json")
        return directory / "config.json"
    if directory.exists():
        raise FileNotFoundError(f"{model} is a file; give the directory that holds config.json")

    from huggingface_hub import hf_hub_download
    from huggingface_hub import logging as hub_logging
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )  # fmt: skip

    hub_logging.set_verbosity_error()  # its client reports each of its retries
    try:
        return Path(hf_hub_download(model, "config.json", revision=revision, token=token))
    except HFValidationError:
        why = "the hub has no such names"
    except GatedRepoError:
        why = "the hub's model of that name is gated; log in with `hf auth login`"
    except RepositoryNotFoundError:
        why = "the hub shows no model of that name"
    except RevisionNotFoundError:
        why = f"the hub's model of that name has no revision {revision}"
    except LocalEntryNotFoundError:
        why = "the hub cannot be reached"
    except EntryNotFoundError:
        why = "the hub's model of that name has no config.json"
    except OSError as error:  # the network's many ways
        why = f"the hub cannot be reached ({type(error).__name__})"
    raise FileNotFoundError(f"there is no directory {model}, and {why}; give a local directory, or another name")


def model_from_config(given: dict, name: str) -> Model:
    """`Model` of a config.json's content: transformers builds the module tree on the meta device, without memory.

    Raises:
        ValueError: see `load_model`.
    """
    from transformers import AutoModelForCausalLM

    config = _decoder_config(given, name)
    try:
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        max_positions = config.max_position_embeddings
    except Exception:  # transformers raises one of its own kind where a value differs by layer
        what = "has no single number of heads, head size or number of positions"
        raise _refused(name, config.model_type, what) from None
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ValueError(f"the sizes in the config.json of {name} make no model: {_one_line(error)}") from None

    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    ends = {id(embedding.weight), id(head.weight)}
    layers: dict[int, dict[str, torch.nn.Parameter]] = {}
    others = 0
    for parameter_name, parameter in module.named_parameters():
        in_layer = re.search(r"\.(\d+)\.(.+)", parameter_name)
        if in_layer:
            layers.setdefault(int(in_layer[1]), {})[in_layer[2]] = parameter
        elif id(parameter) not in ends:
            others += parameter.numel()
    names = {n for parameters in layers.values() for n in parameters}
    if any("expert" in n for n in names):
        raise _refused(name, config.model_type, "is a mixture-of-experts model")
    if not any("attn" in n or "attention" in n for n in names):
        raise _refused(name, config.model_type, "has no attention layers")
    ropes = _ropes(config)
    return Model(
        name=name,
        layers=tuple(_layer(layers[i]) for i in sorted(layers)),
        embedding=embedding.weight.numel(),
        head=0 if head.weight is embedding.weight else head.weight.numel(),
        others=others,
        hidden_size=config.hidden_size,
        vocab_size=embedding.weight.shape[0],
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rotary_tables=len(ropes),
        max_positions=max_positions,
        scaled_rope=any(r.get("rope_type", "default") != "default" for r in ropes),
    )


def _decoder_config(given: dict, name: str):
    """The transformers config of a dense decoder; ValueError for anything else."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    kind = given["model_type"]
    if given.get("quantization_config"):
        raise ValueError(f"{name} is quantized, so there is nothing to substitute; use the unquantized checkpoint")
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"{name} is of a kind that transformers does not know ({kind}), so its sizes cannot be told; "
            "say yourself what vLLM offloads, as --offload-group-size 1"
        )
    try:
        config = CONFIG_MAPPING[kind].from_dict(given)
    except Exception as error:
        raise ValueError(f"the config.json of {name} is not one of a {kind} model: {_one_line(error)}") from None
    if config.is_encoder_decoder:
        raise _refused(name, kind, "is an encoder-decoder model")
    if any(hasattr(config, part) for part in ("vision_config", "audio_config", "text_config")):
        raise ValueError(f"{name} is a multimodal model ({kind}); use the text-only checkpoint")
    heads = given.get("architectures") or ["ForCausalLM"]
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not heads[0].endswith(("ForCausalLM", "LMHeadModel")):
        raise _refused(name, kind, "is no text-generating decoder")
    if getattr(config, "kv_lora_rank", None):
        raise _refused(name, kind, "has multi-head latent attention")
    other_kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    if other_kinds:
        raise _refused(name, kind, f"has layers of kind {', '.join(sorted(other_kinds))}")
    return config


def _refused(name: str, kind: str, what: str) -> ValueError:
    return ValueError(f"{name} {what} ({kind}), which subspec does not serve")


def _ropes(config) -> list[dict]:
    """Settings of each rotary embedding: one, or one each for full and for sliding layers."""
    settings = getattr(config, "rope_parameters", None) or {}
    by_kind = [r for kind, r in settings.items() if kind in (getattr(config, "layer_types", None) or [])]
    return by_kind or [settings]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _layer(parameters: dict[str, torch.nn.Parameter]) -> Layer:
    linears: dict[str, tuple[int, int]] = {}
    others = 0
    for name, parameter in parameters.items():
        if parameter.ndim != 2:
            others += parameter.numel()
            continue
        fused = re.sub(r"\b[qkv]_proj", "qkv_proj", re.sub(r"\b(gate|up)_proj", "gate_up_proj", name))
        outputs, inputs = parameter.shape
        linears[fused] = (linears.get(fused, (0, 0))[0] + outputs, inputs)
    return Layer(linears, others)
