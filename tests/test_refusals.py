"""Every feature that is refused: at the start, in one sentence that names the option or kind of model and the remedy.

Checkpoints are a config.json and nothing else; no engine starts. "vLLM" marks what vLLM itself refuses before us.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import transformers
from test_config import checkpoint, configure, message  # noqa: F401  # fixtures

SUBSPEC = {"method": "subspec"}
DENSE = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
MLA = dict(
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=4,
    num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
)  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
VISION = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=28, patch_size=14,
)  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "group_size": 32, "strategy": "group"}}},
}  # fmt: skip

# By name: (architecture, class of the config, its fields, words of the sentence).
MODELS = {
    "MoE: Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**DENSE, "num_local_experts": 4}, "mixture-of-experts"),
    "MoE: Qwen3": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "mixture-of-experts",
    ),
    "MoE with attention sinks: gpt-oss": (
        "GptOssForCausalLM", "GptOssConfig", {**DENSE, "num_local_experts": 4, "head_dim": 16}, "mixture-of-experts",
    ),
    "MLA: DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**DENSE, **MLA}, "multi-head latent attention"),
    "Mamba": ("MambaForCausalLM", "MambaConfig", dict(vocab_size=320, hidden_size=64, num_hidden_layers=2), "Mamba"),
    "hybrid: Jamba": (
        "JambaForCausalLM", "JambaConfig", {**DENSE, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
        "Mamba",
    ),
    "hybrid: Granite": (
        "GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
        {**DENSE, "num_local_experts": 0, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8,
         "mamba_d_head": 16},
        "Mamba",
    ),
    "encoder-decoder: Whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        dict(vocab_size=320, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
             decoder_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
        "encoder-decoder",
    ),
    "multimodal: PaliGemma": (
        "PaliGemmaForConditionalGeneration", "PaliGemmaConfig",
        dict(text_config={"model_type": "gemma", **DENSE},
             vision_config={"model_type": "siglip_vision_model", **VISION}),
        "multimodal",
    ),
    "M-RoPE": ("Qwen2ForCausalLM", "Qwen2Config", {**DENSE, "rope_parameters": MROPE}, "multimodal"),
    "pooling: BERT": ("BertModel", "BertConfig", dict(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96), "'pooling'"),
    "reward": ("Qwen2ForRewardModel", "Qwen2Config", DENSE, "'pooling'"),
    "classification": ("LlamaForSequenceClassification", "LlamaConfig", DENSE, "'pooling'"),
    "ALiBi: BLOOM": (
        "BloomForCausalLM", "BloomConfig", dict(vocab_size=320, hidden_size=64, n_layer=2, n_head=4), "ALiBi",
    ),
    "chunked attention: Llama 4": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        {**DENSE, "num_local_experts": 0, "attention_chunk_size": 64, "head_dim": 16, "interleave_moe_layer_step": 100},
        "chunked local attention",
    ),
    "dual chunk attention: Qwen2.5-1M": (
        "Qwen2ForCausalLM", "Qwen2Config", {**DENSE, "dual_chunk_attention_config": {"chunk_size": 64}},
        "dual chunk attention",
    ),
    "FP8": ("LlamaForCausalLM", "LlamaConfig", {**DENSE, "quantization_config": FP8}, "already quantized (fp8)"),
    "GPTQ": ("LlamaForCausalLM", "LlamaConfig", {**DENSE, "quantization_config": GPTQ}, "already quantized"),
    "AWQ": ("LlamaForCausalLM", "LlamaConfig", {**DENSE, "quantization_config": AWQ}, "already quantized"),
    "compressed-tensors": (
        "LlamaForCausalLM", "LlamaConfig", {**DENSE, "quantization_config": COMPRESSED},
        "already quantized (compressed-tensors)",
    ),
    "bitsandbytes": (  # vLLM: this release has no such method
        "LlamaForCausalLM", "LlamaConfig",
        {**DENSE, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes",
    ),
}  # fmt: skip

# Engine arguments, words of the sentence.
ARGUMENTS = [
    ({"tensor_parallel_size": 2}, ["--tensor-parallel-size", "set it to 1"]),
    ({"pipeline_parallel_size": 2}, ["--pipeline-parallel-size", "set it to 1"]),
    ({"data_parallel_size": 2}, ["--data-parallel-size", "set it to 1"]),
    ({"decode_context_parallel_size": 2}, ["--decode-context-parallel-size", "set it to 1"]),
    ({"prefill_context_parallel_size": 2}, ["--prefill-context-parallel-size", "set it to 1"]),
    ({"nnodes": 2}, ["--nnodes"]),  # vLLM
    ({"distributed_executor_backend": "ray"}, ["--distributed-executor-backend", "mp or uni"]),
    ({"distributed_executor_backend": "external_launcher"}, ["--distributed-executor-backend", "mp or uni"]),
    ({"enable_expert_parallel": True}, ["remove --enable-expert-parallel"]),
    ({"enable_eplb": True}, ["remove --enable-eplb"]),
    ({"enable_elastic_ep": True}, ["remove --enable-elastic-ep"]),
    ({"enable_batch_sharded_sampling": True}, ["remove --enable-batch-sharded-sampling"]),
    ({"enable_dbo": True}, ["remove --enable-dbo"]),
    ({"ubatch_size": 2}, ["--ubatch-size"]),
    ({"enable_fault_tolerance": True}, ["Fault tolerance"]),  # vLLM
    ({"enable_return_routed_experts": True}, ["only supports MoE models"]),  # vLLM
    ({"enable_lora": True}, ["remove --enable-lora"]),
    ({"quantization": "fp8"}, ["remove --quantization"]),
    ({"quantization": "bitsandbytes"}, ["remove --quantization"]),
    ({"kv_cache_dtype": "fp8"}, ["--kv-cache-dtype", "auto"]),
    ({"kv_cache_dtype": "int8_per_token_head"}, ["--kv-cache-dtype", "auto"]),
    ({"kv_cache_dtype": "bfloat16", "dtype": "float32"}, ["--kv-cache-dtype", "float32"]),
    ({"kv_transfer_config": {"kv_connector": "x", "kv_role": "kv_both"}}, ["remove --kv-transfer-config"]),
    ({"kv_offloading_size": 1.0}, ["remove --kv-offloading-size"]),
    ({"ec_transfer_config": {"ec_connector": "x", "ec_role": "ec_both"}}, ["remove --ec-transfer-config"]),
    ({"weight_transfer_config": {"backend": "nccl"}}, ["remove --weight-transfer-config"]),
    ({"watermark_config": {"algorithm": "gumbel"}}, ["remove --watermark-config"]),
    ({"diffusion_config": {"canvas_length": 8}}, ["remove --diffusion-config"]),
    ({"enable_prompt_embeds": True}, ["--enable-prompt-embeds", "remove"]),
    ({"enable_sleep_mode": True}, ["--enable-sleep-mode", "remove"]),
    ({"enable_cumem_allocator": True}, ["--enable-cumem-allocator", "remove"]),
    ({"enable_trace_replay": True}, ["--enable-trace-replay", "remove"]),
    ({"structured_outputs_config": {"backend": "lm-format-enforcer"}}, ["lm-format-enforcer", "use xgrammar"]),
    ({"kv_sharing_fast_prefill": True}, ["--kv-sharing-fast-prefill", "remove"]),
    ({"worker_cls": "a.B"}, ["remove --worker-cls"]),
    ({"scheduler_cls": "a.B"}, ["remove --scheduler-cls"]),
    ({"max_num_scheduled_tokens": 64}, ["--max-num-scheduled-tokens", "289"]),
    ({"long_prefill_token_threshold": 64}, ["--long-prefill-token-threshold", "289"]),
    ({"runner": "pooling"}, ["'pooling'", "leave the method out"]),
    ({"convert": "embed"}, ["'pooling'", "leave the method out"]),
    ({"attention_backend": "FLASHINFER"}, ["--attention-backend FLASHINFER", "TRITON_ATTN"]),
    ({"attention_backend": "FLEX_ATTENTION"}, ["--attention-backend FLEX_ATTENTION", "TRITON_ATTN"]),
    ({"attention_config": {"backend_per_kind": {"sliding_window": "FLASHINFER"}}}, ["FLASHINFER", "TRITON_ATTN"]),
    ({"attention_config": {"use_non_causal": True}}, ["use_non_causal"]),
    ({"compilation_config": {"mode": 1}}, ["STOCK_TORCH_COMPILE", "--compilation-config"]),
    *(({"load_format": f}, [f"--load-format {f}", "auto"])
      for f in ("tensorizer", "modelexpress", "ipc_cache", "gguf", "bitsandbytes")),
    ({"spec_method": "subspec"}, ["--spec-method", "remove"]),
    ({"spec_model": "x"}, ["model does not apply", "remove"]),
    ({"spec_tokens": 3}, ["num_speculative_tokens", "leave"]),
]  # fmt: skip


@pytest.fixture
def inspected_here(monkeypatch):
    """vLLM looks at a model class in a process of its own, which takes seconds; here in this one."""
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())


@pytest.mark.parametrize("kind", MODELS)
def test_models_that_are_refused(configure, inspected_here, tmp_path, kind):  # noqa: F811
    """Catches: a kind of model that starts and whose trees would be verified by the wrong attention, or not at all."""
    architecture, config_cls, fields, words = MODELS[kind]
    config = {**getattr(transformers, config_cls)(**fields).to_dict(), "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception) as error:
        configure(SUBSPEC, model=str(tmp_path), dtype="auto")
    assert words in message(error)
    if "bitsandbytes" not in kind:
        remedies = ("leave the method out", "use the text-only checkpoint", "use the unquantized checkpoint")
        assert message(error).startswith("subspec: ") and message(error).endswith(remedies)


def test_a_multimodal_model_without_its_modality_is_refused(configure, inspected_here, tmp_path):  # noqa: F811
    """Catches: --language-model-only let through, with positions of several dimensions that a tree does not set."""
    config = {**transformers.Qwen2VLConfig(text_config=DENSE).to_dict(), "architectures": ["Qwen2ForCausalLM"]}
    config["text_config"]["rope_parameters"] = MROPE
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception) as error:
        configure(SUBSPEC, model=str(tmp_path), dtype="auto", language_model_only=True)
    assert "multimodal models are not supported" in message(error)


@pytest.mark.parametrize("arguments,words", ARGUMENTS, ids=lambda a: " ".join(a) if isinstance(a, dict) else "")
def test_arguments_that_are_refused(configure, arguments, words):  # noqa: F811
    """Catches: an option that is ignored, changes outputs or crashes later; a sentence without the way out."""
    with pytest.raises(Exception) as error:
        configure(SUBSPEC, **arguments)
    text = message(error)
    assert all(word in text for word in words), text
    assert "Traceback" not in text and "ArgsKwargs((), {'target" not in text


@pytest.mark.parametrize(
    "field",
    [
        {"draft_tensor_parallel_size": 1}, {"quantization": "fp8"}, {"max_model_len": 64}, {"parallel_drafting": True},
        {"num_speculative_tokens_per_batch_size": [[1, 1, 3]]}, {"disable_padded_drafter_batch": True},
        {"attention_backend": "TRITON_ATTN"}, {"rejection_sample_method": "standard"}, {"moe_backend": "auto"},
        {"draft_sample_method": "probabilistic"}, {"prompt_lookup_max": 3}, {"enable_adaptive_verification": True},
    ],
    ids=lambda f: next(iter(f)),
)  # fmt: skip
def test_options_of_other_speculative_methods_are_refused(configure, field):  # noqa: F811
    """Catches: an option of vLLM's own methods that is accepted and does nothing."""
    with pytest.raises(Exception) as error:
        configure({**SUBSPEC, **field})
    assert f"{next(iter(field))} does not apply to method subspec; remove it" in message(error)


def test_the_flag_for_vllms_own_methods_does_not_know_ours():
    """Catches: --spec-method accepted without the fields that it cannot carry. vLLM: its parser names the choices."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    with pytest.raises(Exception, match="subspec"):
        parser.parse_args(["--spec-method", "subspec"])


@pytest.mark.parametrize("name", ["VLLM_BATCH_INVARIANT", "VLLM_USE_BREAKABLE_CUDAGRAPH"])
def test_environment_that_is_refused(configure, monkeypatch, name):  # noqa: F811
    """Catches: a promise of vLLM's that trees do not keep, a replayed graph around them."""
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=f"subspec: .*{name}"):
        configure(SUBSPEC)


def test_a_checkpoint_of_another_speculative_method_is_refused():
    """Catches: the method that a speculators checkpoint names, silently instead of ours."""
    from vllm.config import SpeculativeConfig

    from vllm_subspec.engine.support import check_config

    other = object.__new__(SpeculativeConfig)
    other.__dict__["method"] = "eagle3"
    with pytest.raises(ValueError, match="'eagle3'; serve the model that it drafts for"):
        check_config(SimpleNamespace(speculative_config=other))


# --- what only the loaded model shows


def layer(backend: str = "FLASH_ATTN", **differs):
    """A layer as vLLM's, with what `install` looks at."""
    import torch
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionType

    impl = type("Impl", (), {})()
    impl.__dict__.update(differs.pop("impl", {}))
    made = object.__new__(differs.pop("cls", Attention))
    made.__dict__.update(
        impl=impl, attn_type=AttentionType.DECODER, head_size=8, head_size_v=8, num_kv_heads=2, kv_cache_dtype="auto",
        kv_cache=torch.zeros(1, 2, 4, 16), attn_backend=SimpleNamespace(get_name=lambda: backend),
    )  # fmt: skip
    made.__dict__.update(differs)
    return made


def other_attention(name: str) -> type:
    from vllm.model_executor.layers import attention

    return getattr(attention, name)


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: layer("FLASHINFER"), "FLASHINFER, which was not tested .* add --attention-backend FLASH_ATTN"),
        (lambda: layer(impl={"sinks": 1}), "attention sinks"),
        (lambda: layer(impl={"alibi_slopes": 1}), "ALiBi slopes"),
        (lambda: layer(impl={"chunk_lookback": 1}), "chunked attention"),
        (lambda: layer(attn_type="encoder_only"), "not causal"),
        (lambda: layer(head_size_v=4), "different sizes"),
        (lambda: layer(num_kv_heads=4), "KV cache layout"),
        (lambda: layer(kv_cache_dtype="fp8"), "quantized KV cache"),
        (lambda: layer(cls=other_attention("ChunkedLocalAttention")), "ChunkedLocalAttention"),
        (lambda: layer(cls=other_attention("CrossAttention")), "CrossAttention"),
        (lambda: SimpleNamespace(), "SimpleNamespace"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_attention_that_trees_do_not_know_is_refused(make, words):
    """Catches: layers of the loaded model that the configuration did not give away, verified by another attention."""
    from vllm_subspec.round.attention.impl import install

    install({"fine": layer()})
    with pytest.raises(NotImplementedError, match=words):
        install({"layer": make()})


def test_a_model_with_inputs_of_its_own_is_refused():
    """Catches: a model whose class exchanges positions, inputs or the sampler behind the batch that holds the tree."""
    from vllm_subspec.engine.runner import SubSpecRunner

    class Base:
        def load_model(self):
            self.model = self.model_state = object()

    runner = object.__new__(type("Runner", (SubSpecRunner, Base), {}))
    with pytest.raises(NotImplementedError, match="leave the method out"):
        runner.load_model()


# --- what is accepted


@pytest.mark.parametrize(
    "arguments",
    [
        *({"optimization_level": level} for level in range(4)),
        *({"compilation_config": {"mode": mode}} for mode in (0, 2, 3)),
        {"enforce_eager": True}, {"async_scheduling": False}, {"async_scheduling": True},
        {"enable_prefix_caching": True}, {"enable_prefix_caching": False},
        {"attention_backend": "TRITON_ATTN"}, {"attention_backend": "FLASH_ATTN"},
        {"generation_config": "vllm"}, {"override_generation_config": {"temperature": 0.5}}, {"spec_tokens": 288},
        *({"load_format": f} for f in ("hf", "safetensors", "pt", "npcache", "runai_streamer", "sharded_state")),
        {"kv_cache_dtype": "bfloat16", "dtype": "bfloat16"}, {"performance_mode": "throughput"},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_are_accepted(configure, arguments):  # noqa: F811
    """Catches: an option that works refused."""
    c = configure(SUBSPEC, **arguments)
    assert c.speculative_config.method == "subspec" and not c.scheduler_config.async_scheduling


@pytest.mark.parametrize(
    "size, dtype, cuda, refused",
    [(16, "bfloat16", True, True), (256, "float16", True, True), (16, "bfloat16", False, False),
     (64, "bfloat16", True, False), (16, "float32", True, False)],
)  # fmt: skip
def test_group_sizes_without_a_kernel_are_refused(size, dtype, cuda, refused):
    """Catches: substitutes of full size, which fail for want of memory under another name."""
    from vllm_subspec.engine.support import group_size_problems

    problems = list(group_size_problems(size, dtype, cuda))
    assert len(problems) == refused and all("32, 64 or 128" in p for p in problems)


@pytest.mark.parametrize(
    "given,made",
    [("FULL", "NONE"), ("FULL_DECODE_ONLY", "NONE"), ("FULL_AND_PIECEWISE", "PIECEWISE"), ("PIECEWISE", "PIECEWISE"),
     ("NONE", "NONE")],
)  # fmt: skip
def test_cuda_graphs_never_contain_the_attention_of_a_tree(given, made):
    """Catches: a full CUDA graph replayed for a tree, with the attention of the batch that it was captured for."""
    from vllm.config import CUDAGraphMode

    from vllm_subspec.engine.support import without_full_graphs

    compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode[given])
    without_full_graphs(SimpleNamespace(compilation_config=compilation))
    assert compilation.cudagraph_mode == CUDAGraphMode[made]
