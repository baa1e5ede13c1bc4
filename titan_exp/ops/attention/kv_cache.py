"""Attention with a KV cache, for generation."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.ops.attention.sinks import math_attention_with_sinks


class CachedAttention(nn.Module):
    """Replaces `CausalAttention` while one sequence of at most `length` tokens grows."""

    def __init__(self, core: CausalAttention, length: int) -> None:
        super().__init__()
        self.core, self.length, self.pattern = core, length, core.pattern
        self.filled = 0
        """Number of cached tokens."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def reset(self) -> None:
        """Start another sequence."""
        self.filled = 0

    def mask(self, documents: Any, positions: Any = None, *, seq: int = 0, device: torch.device | None = None) -> Any:
        """Mask of the first call's tokens; None for a later token. A generated text is one document."""
        assert documents is None
        return None if self.filled else self.core.mask(None, seq=seq, device=device)

    def forward(
        self,
        query: Float[Tensor, "batch heads new head_dim"],
        key: Float[Tensor, "batch kv_heads new head_dim"],
        value: Float[Tensor, "batch kv_heads new head_dim"],
        mask: Any = None,
        sinks: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "batch heads new head_dim"]:
        """Attend to the visible tokens so far. The first call takes several tokens, later ones take one each."""
        first, self.filled = self.filled, self.filled + key.shape[2]
        assert self.filled <= self.length, "the sequence is longer than the cache"
        keys, values = self._allocate(key)
        keys[:, :, first : self.filled], values[:, :, first : self.filled] = key, value
        if first == 0:
            return self.core(query, key, value, mask) if sinks is None else self.core(query, key, value, mask, sinks)
        assert key.shape[2] == 1, "later calls take one token"
        seen = slice(self.pattern.first_visible(self.filled - 1), self.filled)
        past = keys[:, :, seen], values[:, :, seen]
        if sinks is not None:
            how = {"visible": None, "causal": False, "scale": self.core.scale}
            return math_attention_with_sinks(query, *past, sinks=sinks, **how)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, *past, scale=self.core.scale, enable_gqa=grouped)

    def _allocate(self, key: Tensor) -> tuple[Tensor, Tensor]:
        if self._keys is None or self._values is None:
            batch, heads, _, width = key.shape
            self._keys = torch.empty(batch, heads, self.length, width, dtype=key.dtype, device=key.device)
            self._values = torch.empty_like(self._keys)
        return self._keys, self._values
