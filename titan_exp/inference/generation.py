"""A model that writes: logits of the next token of a growing text, with keys and values kept or computed anew."""

import torch
from torch import Tensor, nn

from titan_exp.models.decoder import Decoder
from titan_exp.ops.attention.kv_cache import CachedAttention


class DecodeSession:
    """The text so far, and what the model says of its next token.

    A text longer than the model's window loses its first half window, and again whenever the window is full: what is
    left is computed anew, because positions count from the window's start.

    Args:
        model: on its device, in evaluation mode.
        window: longest sequence in tokens that the model sees.
        cache: whether to keep keys and values; a model of the user's own never does.
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
        """Begin another text."""
        self._begin = 0
        for core in self._cores:
            core.reset()

    @torch.no_grad()
    def next_logits(self, ids: list[int]) -> Tensor:
        """fp32 logits [vocab] of the token after `ids`, which begin with those of the call before."""
        begin = window_start(len(ids), self._window)
        if begin != self._begin:
            self._begin = begin
            for core in self._cores:
                core.reset()
        known = self._cores[0].filled if self._cores else 0
        tokens = torch.tensor([ids[begin + known :]], device=self._device)
        positions = torch.arange(known, len(ids) - begin, device=self._device)[None] if known else None
        logits = self._model(tokens) if positions is None else self._model(tokens, positions)
        return logits[0, -1].float()


def window_start(length: int, window: int) -> int:
    """The first token that the model sees of a text: it moves on by half windows."""
    half = max(1, window // 2)
    return 0 if length <= window else -(-(length - window) // half) * half
