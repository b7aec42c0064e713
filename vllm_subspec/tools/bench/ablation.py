"""What an ablation turns off (paper, ablation study): the shared KV cache and the overlapped transfer of layers.

An engine that has both (every engine, unless its speculative config says otherwise) uses nothing of this module.

A draft with a private KV cache has Attention layers of its own, which vLLM knows by names of their own. So vLLM itself
gives them caches in the request's blocks, counts these when it sizes the KV cache (which then holds half the tokens),
and prefix caching, block tables and metadata cover them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.offloader import get_offloader, set_offloader
from vllm.model_executor.offloader.prefetch import PrefetchOffloader

from ...engine.runner import SubSpecRunner
from ...engine.worker import SubSpecWorker
from ...round.attention.metadata import TreeMetadata
from ...round.draft import SubSpecSpeculator
from ...round.tree import TokenTree
from ...weights.draft import shallow_copy

logger = init_logger("vllm.subspec.ablation")

PREFIX = "draft."
"""Of the names of the draft's own Attention layers"""


def private_attention(
    model: torch.nn.Module, static_forward_context: dict[str, torch.nn.Module]
) -> dict[str, torch.nn.Module]:
    """An Attention layer for each of the target's, to have a KV cache of its own.

    Args:
        static_forward_context: where vLLM looks for layers that need a cache, before it sizes the cache; the new ones
            are added

    Returns:
        They, by the name of the target's module that each stands in for (see `substitute.model.make_draft`).
    """
    made = {}
    for name, target in model.named_modules():
        if not isinstance(target, Attention):
            continue
        layer = shallow_copy(target)
        layer.layer_name = PREFIX + target.layer_name
        if target.kv_sharing_target_layer_name is not None:
            layer.kv_sharing_target_layer_name = PREFIX + target.kv_sharing_target_layer_name
        static_forward_context[layer.layer_name] = made[name] = layer
    return made


class PrivateKVSpeculator(SubSpecSpeculator):
    """A draft that reads only KV that it has written itself.

    So it must see every token: it runs over what the target's plain passes (prefill, plain decoding) run over, and
    over the last level of every tree, which nothing else would run through the draft: one pass a round more. So it
    drafts to the end, whatever the confidence threshold is.
    """

    _warned = False

    def set_tree(self, width: int, depth: int, **options: float) -> None:
        super().set_tree(width, depth, **options)
        # The additional pass grows a level that nobody sees.
        self.tree = TokenTree.empty(1 + self.tree_width * (self.tree_depth + 1), self.device)

    def draft(self, root: torch.Tensor, context_len: torch.Tensor, num_nodes: int) -> TokenTree:
        # A tree that ends inside a level ends where the context does: there is no room, and no need.
        whole_levels = num_nodes > 0 and num_nodes % self.tree_width == 0
        additional = self.tree_width if whole_levels else 0
        tree = super().draft(root, context_len, num_nodes + additional)
        self.drafted = num_nodes
        return tree.prefix(1 + num_nodes)

    def _gives_up(self, level: int) -> bool:
        return False

    def propose(self, input_batch, attn_metadata, slot_mappings, *args: Any, **kwargs: Any) -> torch.Tensor:
        verifies = any(isinstance(m, TreeMetadata) for m in (attn_metadata or {}).values())
        if not verifies:
            try:
                self._follow(input_batch, attn_metadata, slot_mappings)
            except Exception:
                if not self._warned:
                    logger.exception("The draft did not follow the target; its guesses will be worse")
                self._warned = True
        return super().propose(input_batch)

    def _follow(self, input_batch, attn_metadata, slot_mappings) -> None:
        """Run the draft over the batch that the target has just run over."""
        context = set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=input_batch.num_tokens_after_padding,
            slot_mapping=slot_mappings,
            skip_compiled=True,
        )
        with context, self._own_kernels():
            self.model(input_ids=input_batch.input_ids, positions=input_batch.positions)


class SynchronousOffloader(PrefetchOffloader):
    """vLLM's prefetch offloader without the prefetch: a layer is copied when it is reached, on the computing stream.

    Weights, buffers and the hooks around the layers' forwards stay those of the offloader that it was made from.
    """

    def __init__(self, original: PrefetchOffloader):
        """To be made when ``original`` holds its final weights."""
        self.__dict__.update(original.__dict__)
        self.sync_prev_onload()  # the first layers are on their way

    def _wait_for_layer(self, layer_idx: int) -> None:
        for parameter in self.module_offloaders[layer_idx]._param_offloaders.values():
            parameter._gpu_buffer.copy_(parameter._cpu_storage, non_blocking=True)

    def _start_prefetch(self, layer_idx: int) -> None:
        pass


def transfer_when_reached() -> None:
    """From now on offloaded layers are transferred without overlap. To be called when the target is loaded.

    Only vLLM's prefetch backend overlaps: with another, or without offloading, this changes nothing and says so.
    """
    offloader = get_offloader()
    if isinstance(offloader, PrefetchOffloader):
        set_offloader(SynchronousOffloader(offloader))
    else:
        logger.warning("async_transfer is off, but this engine has no prefetch offloading: it makes no difference")


class AblationRunner(SubSpecRunner):
    """Our runner with what the speculative config turns off turned off."""

    @staticmethod
    def speculator_cls(vllm_config: VllmConfig, device: torch.device) -> SubSpecSpeculator:
        cls = SubSpecSpeculator if vllm_config.speculative_config.share_kv else PrivateKVSpeculator
        return cls(vllm_config, device)

    def _make_draft(self, substitutes: dict[str, torch.nn.Module]) -> None:
        if not self.speculative_config.share_kv:
            substitutes |= private_attention(self.model, self.compilation_config.static_forward_context)
        if not self.speculative_config.async_transfer:
            transfer_when_reached()
        super()._make_draft(substitutes)


class AblationWorker(SubSpecWorker):
    """The CUDA worker of an ablation."""

    runner_mixin = AblationRunner
