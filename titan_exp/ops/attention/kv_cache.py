"""Attention with a cache of keys and values, of latents, or of the state of linear attention, for generation."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from titan_exp.ops.attention.attention_with_lse import math_attention_with_sinks
from titan_exp.ops.attention.mask_pattern import MaskPattern
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.ops.linear_attention import gated_delta, gated_delta_step, short_convolution, short_convolution_step


class CachedAttention(nn.Module):
    """KV cache: replaces `CausalAttention` while one sequence of at most `length` tokens grows."""

    def __init__(self, core: CausalAttention, length: int) -> None:
        super().__init__()
        self.core, self.length, self.pattern = core, length, core.pattern
        self.filled = 0
        """Number of cached tokens."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def reset(self) -> None:
        self.filled = 0

    def mask(self, documents: Any, positions: Any = None, *, seq: int = 0, device: torch.device | None = None) -> Any:
        """Mask of the first call's tokens; None for later tokens. A generated text is one document."""
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


class LatentCache(nn.Module):
    """Cache of multi-head latent attention while one sequence of at most `length` tokens grows: one latent and one
    rotated key per token, no heads.

    Later tokens attend to latents directly: the expansion of keys is absorbed into the query, and that of values into
    the output (DeepSeek-AI 2024), so that cached tokens are never expanded.

    A head has `own_dim` features of its own and a value of `v_dim`; `scale` is the factor of the scores, and `pattern`
    names the visible tokens.
    """

    def __init__(self, length: int, *, own_dim: int, v_dim: int, scale: float, pattern: MaskPattern) -> None:
        super().__init__()
        self.length, self.own_dim, self.v_dim, self.scale, self.pattern = length, own_dim, v_dim, scale, pattern
        self.filled = 0
        """Number of cached tokens."""
        self._latents: Tensor | None = None
        self._shared: Tensor | None = None

    def reset(self) -> None:
        self.filled = 0

    def append(self, latent: Float[Tensor, "batch new latent"], shared: Float[Tensor, "batch new rope"]) -> bool:
        """Cache new tokens. Returns True if there are earlier ones, so that `attend` must be called. The first call
        takes several tokens, later ones take one each."""
        first, self.filled = self.filled, self.filled + latent.shape[1]
        assert self.filled <= self.length, "the sequence is longer than the cache"
        assert first == 0 or latent.shape[1] == 1, "later calls take one token"
        if self._latents is None or self._shared is None:
            batch = latent.shape[0]
            self._latents = latent.new_empty(batch, self.length, latent.shape[-1])
            self._shared = shared.new_empty(batch, self.length, shared.shape[-1])
        self._latents[:, first : self.filled], self._shared[:, first : self.filled] = latent, shared
        return first > 0

    def attend(
        self, query: Float[Tensor, "batch heads 1 qk"], weight: Float[Tensor, "rows latent"]
    ) -> Float[Tensor, "batch heads 1 v"]:
        """Attend from the last token to the cached tokens that it sees. `weight` expands latents, by head, to the
        unrotated key and the value."""
        assert self._latents is not None, "append comes first"
        assert self._shared is not None
        seen = slice(self.pattern.first_visible(self.filled - 1), self.filled)
        latents, shared = self._latents[:, None, seen], self._shared[:, None, seen]
        of_key, of_value = weight.unflatten(0, (query.shape[1], -1)).split((self.own_dim, self.v_dim), dim=1)
        own, rotated = query.split((self.own_dim, query.shape[-1] - self.own_dim), dim=-1)
        scores = (own @ of_key) @ latents.mT + rotated @ shared.mT
        shares = (scores.float() * self.scale).softmax(-1).to(query.dtype)
        return (shares @ latents) @ of_value.mT


class RecurrentCache(nn.Module):
    """Cache of linear attention while one sequence grows: a state per value head, and the last inputs of the
    convolution. Its size does not depend on the sequence's length."""

    def __init__(self) -> None:
        super().__init__()
        self.filled = 0
        """Number of tokens that the state has read."""
        self._inputs: Tensor | None = None
        self._state: Tensor | None = None

    def reset(self) -> None:
        self.filled = 0

    def convolve(
        self, x: Float[Tensor, "batch new channels"], weight: Float[Tensor, "channels taps"]
    ) -> Float[Tensor, "batch new channels"]:
        """Convolve new tokens with those before them. The first call takes several tokens, later ones take one each."""
        if self.filled == 0:
            self._inputs = F.pad(x, (0, 0, weight.shape[1] - 1, 0))[:, x.shape[1] :]
            return short_convolution(x, weight, None)
        assert self._inputs is not None
        assert x.shape[1] == 1, "later calls take one token"
        out, self._inputs = short_convolution_step(x[:, 0], weight, self._inputs)
        return out[:, None]

    def attend(
        self,
        query: Float[Tensor, "batch new key_heads key_dim"],
        key: Float[Tensor, "batch new key_heads key_dim"],
        value: Float[Tensor, "batch new value_heads value_dim"],
        gates: tuple[Float[Tensor, "batch new value_heads *key_dim"], Float[Tensor, "batch new value_heads"]],
    ) -> Float[Tensor, "batch new value_heads value_dim"]:
        """Write new tokens to the state and read it. `gates` are the logarithm of the decay and the write strength."""
        first, self.filled = self.filled, self.filled + value.shape[1]
        if first == 0:
            out, self._state = gated_delta(query, key, value, *gates, None)
            return out
        assert self._state is not None
        decay, strength = gates
        tokens = query[:, 0], key[:, 0], value[:, 0], decay[:, 0], strength[:, 0]
        out, self._state = gated_delta_step(*tokens, self._state)
        return out[:, None]
