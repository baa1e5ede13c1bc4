"""Autoregressive decoding: next-token logits, with or without a KV cache."""

import torch
from torch import Tensor, nn

from titan_exp.models.decoder import Decoder
from titan_exp.ops.attention.kv_cache import CachedAttention, LatentCache
from titan_exp.ops.attention.sdpa import CausalAttention


class DecodeSession:
    """Decoding state of one text; `cache` enables the KV cache.

    A full window of `window` tokens drops its first half and is recomputed, because positions are relative to its
    start. User-defined models are decoded without a KV cache.
    """

    def __init__(self, model: nn.Module, window: int, *, cache: bool) -> None:
        self._model, self._window = model, window
        self._device = next(model.parameters()).device
        self._caches: list[CachedAttention | LatentCache] = []
        if cache and isinstance(model, Decoder):
            self._caches = [_enable_cache(block.get_submodule("attention"), window) for block in model.blocks.values()]
        self._begin = 0

    def reset(self) -> None:
        """Start a new text."""
        self._begin = 0
        for cache in self._caches:
            cache.reset()

    @torch.no_grad()
    def next_logits(self, ids: list[int]) -> Tensor:
        """Next-token logits in fp32 [vocab]; `ids` must extend the ids of the previous call."""
        begin = window_start(len(ids), self._window)
        if begin != self._begin:
            self._begin = begin
            for cache in self._caches:
                cache.reset()
        cached = self._caches[0].filled if self._caches else 0
        tokens = torch.tensor([ids[begin + cached :]], device=self._device)
        positions = torch.arange(cached, len(ids) - begin, device=self._device)[None] if cached else None
        logits = self._model(tokens) if positions is None else self._model(tokens, positions)
        return logits[0, -1].float()


def _enable_cache(attention: nn.Module, window: int) -> CachedAttention | LatentCache:
    """Cache of an attention module: its own, or one of keys and values around its core."""
    if hasattr(attention, "enable_cache"):
        return attention.enable_cache(window)  # type: ignore[operator]  # a method, not a submodule
    core = attention.get_submodule("core")
    assert isinstance(core, CausalAttention), "no context parallelism in generation"
    attention.core = CachedAttention(core, window)
    return attention.core


def window_start(length: int, window: int) -> int:
    """First token of the window at the end of a text; advances by half windows."""
    half = max(1, window // 2)
    return 0 if length <= window else -(-(length - window) // half) * half
