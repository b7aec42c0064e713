"""Tiny random checkpoints of the model families that must work, written with transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
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

WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
PARTIAL_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
TIED, ALL_HEADS = {"tie_word_embeddings": True}, {"num_key_value_heads": 4}

# Qwen2.5 is qwen2. Phi-4 is phi3; Phi-4-mini has a partial rotary embedding besides. vLLM serves OLMo, SmolLM3,
# GPT-NeoX, GLM, Phi and StarCoder2 by its Transformers backend. Embeddings are tied, and biases are there, as in the
# checkpoints of that family.
FAMILIES = {
    "llama": ("LlamaConfig", SMALL_HEAD),
    "odd": ("Qwen3Config", {**SMALL_HEAD, "hidden_size": 121, "intermediate_size": 141}),  # no factor of two
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
    "gpt2": ("GPT2Config", {**TIED, **ALL_HEADS, "n_inner": 192}),  # learned positions; weights are stored [in, out]
    "cohere2": ("Cohere2Config", {**TIED, **WINDOWS, "logit_scale": 0.5}),  # attention beside the MLP
    "glm4": ("Glm4Config", {**SMALL_HEAD, **PARTIAL_ROPE}),  # norms before and after
    "nemotron": ("NemotronConfig", {**SMALL_HEAD, **PARTIAL_ROPE}),  # layernorm of 1 + weight, squared ReLU
    "falcon_40b": ("FalconConfig", {**TIED, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "gpt_neox": ("GPTNeoXConfig", {**PARTIAL_ROPE, **ALL_HEADS}),  # attention beside the MLP
}
MORE_FAMILIES = {
    "opt": ("OPTConfig", {**TIED, **ALL_HEADS, "ffn_dim": 192, "word_embed_proj_dim": 128}),
    "opt_350m": (  # the embedding is projected to the layers' size, norms come after the blocks
        "OPTConfig", {**TIED, **ALL_HEADS, "ffn_dim": 192, "word_embed_proj_dim": 64, "do_layer_norm_before": False},
    ),
    "cohere": ("CohereConfig", {**TIED, "use_qk_norm": True, "logit_scale": 0.5}),  # norms as in Command R+
    "glm": ("GlmConfig", {**SMALL_HEAD, **PARTIAL_ROPE}),
    "stablelm": ("StableLmConfig", {**PARTIAL_ROPE, "use_qkv_bias": True}),
    "exaone4": ("Exaone4Config", {**WINDOWS, "sliding_window_pattern": "LLG"}),  # full attention has no positions
    "gptj": ("GPTJConfig", {**ALL_HEADS, "rotary_dim": 16, "n_inner": 192}),  # the head has a bias
    "falcon": ("FalconConfig", TIED),  # one head of keys, attention beside the MLP
    "apertus": ("ApertusConfig", {}),  # an activation with parameters of its own
    "olmo3": ("Olmo3Config", WINDOWS),
    "phi": ("PhiConfig", {**PARTIAL_ROPE, **ALL_HEADS}),  # attention beside the MLP, the head has a bias
    "starcoder2": ("Starcoder2Config", {**TIED, "use_bias": True, "sliding_window": 24}),
    "redpajama": ("GPTNeoXConfig", {**PARTIAL_ROPE, **ALL_HEADS, "use_parallel_residual": False}),
}  # fmt: skip
"""Families that differ from one of the others in little"""


def make(family: str, out: Path, seed: int = 0, **changes) -> str:
    """Write one checkpoint; weights are large enough that outputs vary and small enough that 4 bits follow them."""
    config_cls, extra = {**FAMILIES, **MORE_FAMILIES}[family]
    config = getattr(transformers, config_cls)(**{**COMMON, **extra, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    ends = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    ends.add(id(model.get_output_embeddings().weight))
    tied = 0.1 if "gemma" in family else 0.3  # Gemma multiplies its embedding
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) in ends:
                parameter.normal_(0.0, tied if config.tie_word_embeddings else 1.0)
            elif parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
            elif "bias" in name:
                parameter.normal_(0.0, 0.1)
            elif config.tie_word_embeddings and re.search("norm|ln_f", name) and not re.search(r"\.\d+\.", name):
                parameter += torch.randint(2, parameter.shape) * -2.0  # signs: else each token follows itself
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


def make_all(root: Path, families: Iterable[str] = FAMILIES) -> dict[str, str]:
    return {family: make(family, root / family) for family in families}
