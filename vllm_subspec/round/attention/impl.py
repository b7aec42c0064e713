"""vLLM's attention implementation, whichever it chose, that also takes tree batches."""

from __future__ import annotations

from functools import cache

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType

from ..limits import ATTENTION_BACKENDS, LEAVE_OUT
from .metadata import TreeMetadata
from .tree_kernel import paged_tree_attention


class TreeAttention:
    """Mixed in before vLLM's AttentionImpl: tree rows come here, every other batch goes to vLLM unchanged."""

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs):
        if not isinstance(attn_metadata, TreeMetadata):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        rows = attn_metadata.mask.shape[0]
        self.attend(layer, query[:rows], kv_cache, attn_metadata, output[:rows], self.logits_soft_cap or 0.0)
        return output

    def attend(self, layer, query, kv_cache, meta: TreeMetadata, out, soft_cap: float) -> None:
        """Attention of the metadata's rows into ``out``, [r, heads, head size] as ``query``."""
        paged_tree_attention(
            query, kv_cache, meta.block_table, meta.context_len, meta.mask, meta.row_positions, meta.node_positions,
            out, self.scale, soft_cap, layer.sliding_window, max_keys=meta.max_keys, max_rows=meta.max_rows,
        )  # fmt: skip


def warm_up(layers: list[torch.nn.Module], metadata: dict[str, TreeMetadata]) -> None:
    """Run each kind of layer once on the metadata's rows, so that its kernel is compiled before it is needed."""
    seen = set()
    for layer in layers:
        kind = (layer.sliding_window, layer.num_heads, layer.num_kv_heads, layer.head_size, layer.kv_cache.stride())
        if kind in seen:
            continue
        seen.add(kind)
        meta = metadata[layer.layer_name]
        shape = (meta.mask.shape[0], layer.num_heads, layer.head_size)
        query = torch.zeros(shape, dtype=layer.kv_cache.dtype, device=layer.kv_cache.device)
        layer.impl.forward(layer, query, None, None, layer.kv_cache, meta, torch.empty_like(query))


@cache
def tree_impl(tree_attention: type[TreeAttention], impl_cls: type) -> type:
    """The given AttentionImpl class with tree attention before it."""
    return type(f"Tree{impl_cls.__name__}", (tree_attention, impl_cls), {})


def install(layers: dict[str, torch.nn.Module], tree_attention: type[TreeAttention] = TreeAttention) -> None:
    """Let vLLM's Attention layers take tree batches.

    Raises:
        NotImplementedError: a layer computes something that tree attention does not.
    """
    for name, layer in layers.items():
        # A subclass changes who sees whom, or is no attention at all; both would go wrong without an error.
        if type(layer) is not Attention:
            kind = type(layer).__name__
            raise NotImplementedError(f"subspec: {name} is a {kind}, which trees do not support; {LEAVE_OUT}")
        impl, backend = layer.impl, layer.attn_backend.get_name()
        if isinstance(impl, TreeAttention):  # vLLM makes a KV cache for profiling before the real one
            continue
        if backend not in ATTENTION_BACKENDS:
            raise NotImplementedError(
                f"subspec: vLLM chose the attention backend {backend}, which was not tested with trees; "
                f"add --attention-backend {' or '.join(ATTENTION_BACKENDS[:2])}"
            )
        unsupported = [
            what
            for what, present in (
                ("ALiBi slopes", getattr(impl, "alibi_slopes", None) is not None),
                ("attention sinks", getattr(impl, "sinks", None) is not None),
                ("attention that is not causal", layer.attn_type != AttentionType.DECODER),
                ("chunked attention", getattr(impl, "chunk_lookback", -1) > -1),
                ("keys and values of different sizes", layer.head_size_v != layer.head_size),
                (
                    f"an unknown KV cache layout of {backend}",
                    layer.kv_cache.shape[1] != layer.num_kv_heads or layer.kv_cache.shape[3] != 2 * layer.head_size,
                ),
                ("a quantized KV cache", layer.kv_cache_dtype not in ("auto", "bfloat16", "float16", "float32")),
            )
            if present
        ]
        if unsupported:
            used = ", ".join(unsupported)
            raise NotImplementedError(f"subspec: {name} uses {used}, which trees do not support; {LEAVE_OUT}")
        extended = object.__new__(tree_impl(tree_attention, type(impl)))
        extended.__dict__.update(impl.__dict__)
        layer.impl = extended
