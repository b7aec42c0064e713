"""Tiny random checkpoints of the model families that must work, written with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

VOCAB = 320
COMMON = dict(
    vocab_size=VOCAB, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    tie_word_embeddings=False,
)  # fmt: skip
SMALL_HEAD = dict(head_dim=32)
GEMMA = dict(head_dim=32, query_pre_attn_scalar=32, tie_word_embeddings=True)
GRANITE = dict(embedding_multiplier=2.0, attention_multiplier=0.1, residual_multiplier=0.5, logits_scaling=3.0)

# Qwen2.5 is qwen2. Phi-4 is phi3; Phi-4-mini has a partial rotary embedding besides. vLLM serves OLMo-2 and SmolLM3 by
# its Transformers backend.
FAMILIES = {
    "llama": ("LlamaConfig", SMALL_HEAD),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", SMALL_HEAD),
    "mistral": ("MistralConfig", {**SMALL_HEAD, "sliding_window": None}),
    "mistral_window": ("MistralConfig", {**SMALL_HEAD, "sliding_window": 24}),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi4": ("Phi3Config", {"sliding_window": None, "partial_rotary_factor": 0.75}),  # Phi-4-mini
    "gemma2": ("Gemma2Config", {**GEMMA, "sliding_window": 24}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "sliding_window": 24}),
    "olmo2": ("Olmo2Config", {}),  # norms after the blocks, QK norms over all heads at once
    "granite": ("GraniteConfig", GRANITE),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 3}),  # the third layer has no positions
}


def make(family: str, out: Path, seed: int = 0) -> str:
    """Write one checkpoint; weights are large enough that outputs vary and small enough that 4 bits follow them."""
    config_cls, extra = FAMILIES[family]
    config = getattr(transformers, config_cls)(**{**COMMON, **extra})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.0 if "embed" in name or "lm_head" in name else parameter.shape[1] ** -0.5)
            elif "bias" in name:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(out)
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return str(out)


def add_tokenizer(path: str, chat_template: str | None = None) -> None:
    """Give a checkpoint a tokenizer: a token a byte, and words for the other ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<s>", "</s>", *alphabet]
    tokens += [f"w{i}" for i in range(len(tokens), VOCAB)]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=chat_template
    ).save_pretrained(path)


def make_all(root: Path) -> dict[str, str]:
    return {family: make(family, root / family) for family in FAMILIES}
