"""Attention that remembers keys and values, so that writing a text computes each token once."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class CachedAttention(nn.Module):
    """Stands in for `CausalAttention` while one sequence grows: each call continues where the last one ended.

    Args:
        core: what computes the first call of a sequence.
        length: longest sequence in tokens.
    """

    def __init__(self, core: nn.Module, length: int) -> None:
        super().__init__()
        self.core, self.length = core, length
        self.filled = 0
        """Tokens of the sequence so far."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def reset(self) -> None:
        """Begin another sequence."""
        self.filled = 0

    def mask(self, documents: Any) -> None:
        """A text is one document."""
        assert documents is None, "a text is one document"

    def forward(
        self,
        query: Float[Tensor, "batch heads new head_dim"],
        key: Float[Tensor, "batch kv_heads new head_dim"],
        value: Float[Tensor, "batch kv_heads new head_dim"],
        mask: Any = None,
    ) -> Float[Tensor, "batch heads new head_dim"]:
        """Attend to the tokens of this call and of all calls before: several tokens first, then one at a time."""
        first, self.filled = self.filled, self.filled + key.shape[2]
        assert self.filled <= self.length, "the sequence outgrows its memory"
        keys, values = self._room(key)
        keys[:, :, first : self.filled], values[:, :, first : self.filled] = key, value
        if first == 0:
            return self.core(query, key, value, mask)
        assert key.shape[2] == 1, "after the first call tokens come one at a time"
        grouped = query.shape[1] != key.shape[1]
        past = keys[:, :, : self.filled], values[:, :, : self.filled]
        return F.scaled_dot_product_attention(query, *past, enable_gqa=grouped)

    def _room(self, key: Tensor) -> tuple[Tensor, Tensor]:
        if self._keys is None or self._values is None:
            batch, heads, _, width = key.shape
            self._keys = torch.empty(batch, heads, self.length, width, dtype=key.dtype, device=key.device)
            self._values = torch.empty_like(self._keys)
        return self._keys, self._values
