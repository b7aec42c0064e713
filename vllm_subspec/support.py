"""What works with subspec and what is refused at the start, each in one sentence that says what to do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


def check_arguments(args: EngineArgs) -> None:
    """Raise ValueError for what vLLM would refuse later in words that do not help, or what the environment forces."""
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        raise ValueError("subspec: needs vLLM's Model Runner V2; unset VLLM_USE_V2_MODEL_RUNNER")
    if args.worker_cls != "auto":
        raise ValueError("subspec: brings its own worker class; remove --worker-cls")
    if args.async_scheduling:
        raise ValueError("subspec: drafts between two steps of the scheduler; remove --async-scheduling")
    if args.enable_lora:
        raise ValueError("subspec: LoRA adapters are not supported; remove --enable-lora")


def check_config(vllm_config: VllmConfig) -> None:
    """Raise ValueError for an engine configuration that subspec cannot serve without changing its outputs."""
    for problem in _problems(vllm_config):
        raise ValueError(f"subspec: {problem}")


def without_full_graphs(c: VllmConfig) -> None:
    """Attention of a tree batch must run as it is called: vLLM's full CUDA graphs would replay another's. Piecewise
    graphs leave attention out and stay. The draft has a graph of its own."""
    from vllm.config import CUDAGraphMode

    compilation = c.compilation_config
    if compilation.cudagraph_mode.has_full_cudagraphs():
        piecewise = compilation.cudagraph_mode.requires_piecewise_compilation()
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.NONE


def _problems(c: VllmConfig):
    spec, model, parallel = c.speculative_config, c.model_config, c.parallel_config
    rows = spec.tree_width * spec.tree_depth + 1
    budget = c.scheduler_config.max_num_batched_tokens
    if rows > budget:
        yield (
            f"a tree of width {spec.tree_width} and depth {spec.tree_depth} needs {rows} tokens a step but "
            f"--max-num-batched-tokens is {budget}; raise it to at least {rows}, or lower tree_width or tree_depth"
        )
    if spec.tree_width > model.get_vocab_size():
        yield f"tree_width {spec.tree_width} exceeds the vocabulary of {model.get_vocab_size()}; lower tree_width"
    if not c.use_v2_model_runner:
        yield "vLLM chose its old model runner for this configuration; remove the option its log names above"

    for option, size in (
        ("--tensor-parallel-size", parallel.tensor_parallel_size),
        ("--pipeline-parallel-size", parallel.pipeline_parallel_size),
        ("--data-parallel-size", parallel.data_parallel_size),
        ("--decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            yield f"runs on one device, but {option} is {size}; set it to 1"

    hf = model.hf_text_config
    if model.quantization is not None:
        yield (
            f"the target is already quantized ({model.quantization}), so there is nothing to substitute; "
            "use the unquantized checkpoint"
        )
    if model.runner_type != "generate":
        yield f"serves text generation, but this model runs as {model.runner_type!r}; leave the method out"
    if model.is_encoder_decoder:
        yield "encoder-decoder models are not supported; leave the method out"
    if model.supports_multimodal_inputs:
        yield "multimodal models are not supported; use the text-only checkpoint"
    if model.is_moe:
        yield "mixture-of-experts models are not supported; leave the method out"
    if model.use_mla:
        yield "models with multi-head latent attention are not supported; leave the method out"
    if model.is_hybrid or model.is_attention_free:
        yield "models with recurrent (Mamba-like) layers are not supported; leave the method out"
    if getattr(model, "attention_chunk_size", None):
        yield "models with chunked local attention are not supported; leave the method out"
    if getattr(model, "rswa_window", None) is not None:
        yield "models with recurrent sliding-window attention are not supported; leave the method out"
    if getattr(hf, "position_embedding_type", None) == "alibi" or getattr(hf, "alibi", False):
        yield "models with ALiBi position biases are not supported; leave the method out"
    if model.enable_prompt_embeds:
        yield "--enable-prompt-embeds is not supported; remove it"
    if model.enable_sleep_mode:
        yield "--enable-sleep-mode is not supported; remove it"
    if c.kv_transfer_config is not None:
        yield "KV connectors are not supported; remove --kv-transfer-config"
    if c.cache_config.cache_dtype not in ("auto", "bfloat16", "float16"):
        yield f"the KV cache cannot be quantized, but --kv-cache-dtype is {c.cache_config.cache_dtype}; set it to auto"
    if getattr(c, "watermark_config", None) is not None:
        yield "watermarking is not supported; remove its options"
    if c.cache_config.kv_sharing_fast_prefill:
        yield "--kv-sharing-fast-prefill is not supported; remove it"
