"""Autoregressive decoding: next-token logits, with or without a KV cache."""

import torch
from torch import Tensor, nn

from titan_exp.models.decoder import Decoder
from titan_exp.ops.attention.kv_cache import CachedAttention


class DecodeSession:
    """Decoding state of one text; `cache` enables the KV cache.

    A full window of `window` tokens drops its first half and is recomputed, because positions are relative to its
    start. User-defined models are decoded without a KV cache.
    """

    def __init__(self, model: nn.Module, window: int, *, cache: bool) -> None:
        self._model, self._window = model, window
        self._device = next(model.parameters()).device
        self._cores: list[CachedAttention] = []
        if cache and isinstance(model, Decoder):
            for block in model.blocks.values():
                core = CachedAttention(block.attention.core, window)  # type: ignore[union-attr, arg-type]  # blocks
                block.attention.core = core  # type: ignore[union-attr]
                self._cores.append(core)
        self._begin = 0

    def reset(self) -> None:
        """Start a new text."""
        self._begin = 0
        for core in self._cores:
            core.reset()

    @torch.no_grad()
    def next_logits(self, ids: list[int]) -> Tensor:
        """Next-token logits in fp32 [vocab]; `ids` must extend the ids of the previous call."""
        begin = window_start(len(ids), self._window)
        if begin != self._begin:
            self._begin = begin
            for core in self._cores:
                core.reset()
        cached = self._cores[0].filled if self._cores else 0
        tokens = torch.tensor([ids[begin + cached :]], device=self._device)
        positions = torch.arange(cached, len(ids) - begin, device=self._device)[None] if cached else None
        logits = self._model(tokens) if positions is None else self._model(tokens, positions)
        return logits[0, -1].float()


def window_start(length: int, window: int) -> int:
    """First token of the window at the end of a text; advances by half windows."""
    half = max(1, window // 2)
    return 0 if length <= window else -(-(length - window) // half) * half
