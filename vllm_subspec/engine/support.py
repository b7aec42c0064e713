"""What works with subspec and what is refused at the start, each in one sentence that says what to do.

The README lists every feature; tests/test_refusals.py has a case for each.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..cpu.platform import is_cpu_build
from ..round.limits import ATTENTION_BACKENDS, LEAVE_OUT
from ..weights.storage import GPU_GROUP_SIZES

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.subspec")


def check_arguments(args: EngineArgs) -> None:
    """Raise ValueError for engine arguments that subspec cannot serve without changing its outputs.

    Before vLLM makes its configs of them: it changes some by platform, and fails on others in words that do not help.
    """
    _raise_first(_argument_problems(args))


def check_model(model: ModelConfig) -> None:
    """Raise ValueError for a model that subspec cannot serve without changing its outputs."""
    _raise_first(_model_problems(model))


def check_config(vllm_config: VllmConfig) -> None:
    """Raise ValueError for what shows only in the whole engine configuration."""
    _raise_first(_problems(vllm_config))


def _raise_first(problems: Iterable[str]) -> None:
    for problem in problems:
        raise ValueError(f"subspec: {problem}")


def without_async_scheduling(args: EngineArgs) -> None:
    """Switch off, and say so to whoever asked for it: a tree is drafted when the step before is known. It changes no
    output, so a deployment that has the flag starts."""
    if args.async_scheduling:
        logger.warning("subspec: --async-scheduling is switched off, a tree is drafted between two steps")
    args.async_scheduling = False


def without_compilation(args: EngineArgs) -> None:
    """Where layers are offloaded, take -O0 unless the user asked for anything else, and say so.

    A pass over streamed layers waits for PCIe however fast it computes, and compiling the target takes a minute of the
    start and as much GPU memory again as the embedding has. The draft has a CUDA graph of its own.
    """
    from vllm.config.vllm import OptimizationLevel, VllmConfig

    offloads = args.offload_group_size > 0 or args.cpu_offload_gb > 0
    compilation = args.compilation_config
    asked = args.optimization_level != VllmConfig.optimization_level or args.enforce_eager
    asked |= compilation.mode is not None or compilation.cudagraph_mode is not None
    if offloads and not asked:
        logger.info(
            "subspec: -O0, as layers are offloaded and streaming them takes longer than computing; -O1 compiles"
        )
        args.optimization_level = OptimizationLevel.O0


def without_full_graphs(c: VllmConfig) -> None:
    """Attention of a tree batch must run as it is called: vLLM's full CUDA graphs would replay another's. Piecewise
    graphs leave attention out and stay. The draft has a graph of its own."""
    from vllm.config import CUDAGraphMode

    compilation = c.compilation_config
    if compilation.cudagraph_mode.has_full_cudagraphs():
        piecewise = compilation.cudagraph_mode.requires_piecewise_compilation()
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE if piecewise else CUDAGraphMode.NONE


def _argument_problems(args: EngineArgs) -> Iterator[str]:
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        yield "needs vLLM's Model Runner V2; unset VLLM_USE_V2_MODEL_RUNNER"
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        yield "verifies trees by attention that is not batch-invariant; unset VLLM_BATCH_INVARIANT"
    if args.worker_cls != "auto":
        yield "brings its own worker class; remove --worker-cls"
    if args.scheduler_cls is not None:
        yield "brings its own scheduler class; remove --scheduler-cls"
    for kind in ("tensor", "pipeline", "data", "decode_context", "prefill_context"):
        if (size := getattr(args, f"{kind}_parallel_size")) > 1:
            yield f"runs on one device, but --{_dashed(kind)}-parallel-size is {size}; set it to 1"
    if args.distributed_executor_backend not in (None, "uni", "mp"):
        yield "runs on one device; remove --distributed-executor-backend, or set it to mp or uni"
    for flag in ("enable_expert_parallel", "enable_eplb", "enable_elastic_ep", "enable_batch_sharded_sampling"):
        if getattr(args, flag):
            yield f"runs on one device; remove --{_dashed(flag)}"
    if args.enable_dbo or args.ubatch_size > 0:
        yield "a tree cannot be split into microbatches; remove --enable-dbo and --ubatch-size"
    if is_cpu_build():
        for flag in ("offload_group_size", "cpu_offload_gb"):
            if getattr(args, flag):
                yield f"nothing is offloaded on a CPU; leave --{_dashed(flag)} out"
    if args.enable_lora:
        yield "LoRA adapters are not supported; remove --enable-lora"
    if args.quantization is not None or args.quantization_config is not None:
        yield "the target must not be quantized, only its draft is; remove --quantization and --quantization-config"
    if args.kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        yield f"the KV cache cannot be quantized, but --kv-cache-dtype is {args.kv_cache_dtype}; set it to auto"
    for flag, what in (
        ("kv_transfer_config", "KV connectors are"),
        ("kv_offloading_size", "offloading of the KV cache is"),
        ("ec_transfer_config", "encoder cache connectors are"),
        ("weight_transfer_config", "weights that change while the engine runs are"),
        ("watermark_config", "watermarking is"),
        ("diffusion_config", "diffusion decoding is"),
    ):
        if getattr(args, flag) is not None:
            yield f"{what} not supported; remove --{_dashed(flag)}"
    for flag in (
        "enable_prompt_embeds", "enable_sleep_mode", "enable_cumem_allocator", "enable_trace_replay",
        "kv_sharing_fast_prefill",
    ):  # fmt: skip
        if getattr(args, flag):
            yield f"--{_dashed(flag)} is not supported; remove it"
    yield from _load_format_problems(args.load_format)


def _load_format_problems(load_format: str) -> Iterator[str]:
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    loader = _LOAD_FORMAT_TO_MODEL_LOADER.get(load_format)
    # Substitutes are made between loading and repacking in that method; a loader with one of its own skips them.
    if loader is None or loader.load_model is not BaseModelLoader.load_model:
        yield f"--load-format {load_format} does not go through vLLM's common loader; use --load-format auto"


def _model_problems(model: ModelConfig) -> Iterator[str]:
    if model.quantization is not None:
        yield (
            f"the target is already quantized ({model.quantization}), so there is nothing to substitute; "
            "use the unquantized checkpoint"
        )
    if model.runner_type != "generate":
        yield f"serves text generation, but this model runs as {model.runner_type!r}; {LEAVE_OUT}"
    # With --language-model-only too: such a model may still give tokens several positions each (M-RoPE).
    if not model.is_encoder_decoder and (model.is_multimodal_model or model.uses_mrope):
        yield "multimodal models are not supported; use the text-only checkpoint"
    for what, present in (
        ("encoder-decoder models", model.is_encoder_decoder),
        ("models with recurrent (Mamba-like) layers", model.is_hybrid or model.is_attention_free),
        ("models with multi-head latent attention", model.use_mla),
        ("mixture-of-experts models", model.is_moe),
        ("models with chunked local attention", model.attention_chunk_size is not None),
        ("models with dual chunk attention", hasattr(model.hf_config, "dual_chunk_attention_config")),
        ("models with reference sliding-window attention", model.rswa_window is not None),
        ("models with ALiBi position biases", model.uses_alibi),
        ("diffusion models", model.is_diffusion),
    ):
        if present:
            yield f"{what} are not supported; {LEAVE_OUT}"


def _problems(c: VllmConfig) -> Iterator[str]:
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    from .config import SubSpecConfig

    spec = c.speculative_config
    if not isinstance(spec, SubSpecConfig):
        yield f"this checkpoint brings its own speculative method, {spec.method!r}; serve the model that it drafts for"
    rows = 1 + spec.num_speculative_tokens
    scheduler = c.scheduler_config
    for option, tokens in (
        ("--max-num-batched-tokens", scheduler.max_num_batched_tokens),
        ("--max-num-scheduled-tokens", scheduler.max_num_scheduled_tokens),
        ("--long-prefill-token-threshold", scheduler.long_prefill_token_threshold or rows),
    ):
        if tokens < rows:
            yield (
                f"a tree of width {spec.tree_width} and depth {spec.tree_depth} needs {rows} tokens a step at a model "
                f"length of {c.model_config.max_model_len}, but {option} is {tokens}; raise it to at least {rows}, or "
                "lower tree_width or tree_depth"
            )
    vocabulary = c.model_config.get_vocab_size()
    if spec.tree_width > vocabulary:
        yield f"tree_width {spec.tree_width} exceeds the vocabulary of {vocabulary}; lower tree_width"
    if not c.use_v2_model_runner:
        yield "vLLM chose its old model runner for this configuration; remove the option its log names above"
    dtype = str(c.model_config.dtype).removeprefix("torch.")
    yield from group_size_problems(spec.substitute_group_size, dtype, current_platform.is_cuda())
    if c.cache_config.cache_dtype not in ("auto", dtype):  # a checkpoint may ask for it too
        yield (
            f"the KV cache must have the model's dtype, but would be {c.cache_config.cache_dtype}; "
            f"set --kv-cache-dtype to {dtype}"
        )

    if c.structured_outputs_config.backend == "lm-format-enforcer":
        yield "vLLM's lm-format-enforcer backend knows no speculative tokens; use xgrammar, guidance or outlines"

    attention = c.attention_config
    for backend in (attention.backend, *attention.backend_per_kind.values()):
        if backend is not None and backend.name not in ATTENTION_BACKENDS:
            yield (
                f"--attention-backend {backend.name} was not tested with trees; "
                f"use {' or '.join(ATTENTION_BACKENDS[:2])}, or leave it out"
            )
    if attention.use_non_causal:
        yield "attention that is not causal is not supported; remove use_non_causal from --attention-config"
    if c.compilation_config.mode == CompilationMode.STOCK_TORCH_COMPILE:
        yield "compilation mode 1 (STOCK_TORCH_COMPILE) is not supported; leave the mode out of --compilation-config"
    if os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "0") not in ("", "0"):
        yield "breakable CUDA graphs are not supported; set VLLM_USE_BREAKABLE_CUDAGRAPH to 0"


def group_size_problems(group_size: int, dtype: str, cuda: bool) -> Iterator[str]:
    """Group sizes for which a GPU has no 4-bit kernel: substitutes would take as much memory as what they stand for."""
    if cuda and dtype != "float32" and group_size not in GPU_GROUP_SIZES:
        sizes = ", ".join(map(str, GPU_GROUP_SIZES[:-1]))
        yield f"substitute_group_size {group_size} has no 4-bit kernel on a GPU; use {sizes} or {GPU_GROUP_SIZES[-1]}"


def _dashed(flag: str) -> str:
    return flag.replace("_", "-")
