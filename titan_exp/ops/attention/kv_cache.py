"""Attention with a cache of keys and values, of latents, or of the state of linear attention, for generation."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titan_exp.ops.attention.attention_with_lse import math_attention_with_sinks
from titan_exp.ops.attention.mask_pattern import MaskPattern
from titan_exp.ops.attention.sdpa import CausalAttention
from titan_exp.ops.linear_attention import gated_delta, gated_delta_step, short_convolution, short_convolution_step


class _Cache(nn.Module):
    """Cache while one sequence of at most `length` tokens grows; None means any number."""

    def __init__(self, length: int | None) -> None:
        super().__init__()
        self.length, self.filled = length, 0
        """Capacity, and number of cached tokens."""
        self._kept: tuple[Tensor, Tensor] | None = None

    def reset(self) -> None:
        """Start another sequence."""
        self.filled = 0

    def _store(self, first: Tensor, second: Tensor, dim: int) -> tuple[int, Tensor, Tensor]:
        """Append tokens to both tensors along a dim; returns the number of earlier tokens, and both up to capacity."""
        begin, new = self.filled, first.shape[dim]
        self.filled += new
        assert self.length is not None
        assert self.filled <= self.length, "the sequence is longer than the cache"
        assert begin == 0 or new == 1, "later calls take one token"
        if self._kept is None:
            sizes = [[*x.shape[:dim], self.length, *x.shape[dim + 1 :]] for x in (first, second)]
            self._kept = first.new_empty(sizes[0]), second.new_empty(sizes[1])
        for kept, tokens in zip(self._kept, (first, second), strict=True):
            kept.narrow(dim, begin, new).copy_(tokens)
        return begin, *self._kept


class CachedAttention(_Cache):
    """KV cache: replaces `CausalAttention` while one sequence grows."""

    def __init__(self, core: CausalAttention, length: int) -> None:
        super().__init__(length)
        self.core, self.pattern = core, core.pattern

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
        first, keys, values = self._store(key, value, 2)
        if first == 0:
            return self.core(query, key, value, mask) if sinks is None else self.core(query, key, value, mask, sinks)
        seen = slice(self.pattern.first_visible(self.filled - 1), self.filled)
        past = keys[:, :, seen], values[:, :, seen]
        if sinks is not None:
            how = {"visible": None, "causal": False, "scale": self.core.scale}
            return math_attention_with_sinks(query, *past, sinks=sinks, **how)
        grouped = query.shape[1] != key.shape[1]
        return nn.functional.scaled_dot_product_attention(query, *past, scale=self.core.scale, enable_gqa=grouped)


class LatentCache(_Cache):
    """Cache of multi-head latent attention: one latent and one rotated key per token, no heads.

    Later tokens attend to latents directly: the expansion of keys is absorbed into the query, and that of values into
    the output (DeepSeek-AI 2024), so that cached tokens are never expanded.

    A head has `own_dim` features of its own and a value of `v_dim`; `scale` is the factor of the scores, and `pattern`
    names the visible tokens.
    """

    def __init__(self, length: int, *, own_dim: int, v_dim: int, scale: float, pattern: MaskPattern) -> None:
        super().__init__(length)
        self.own_dim, self.v_dim, self.scale, self.pattern = own_dim, v_dim, scale, pattern

    def append(self, latent: Float[Tensor, "batch new latent"], shared: Float[Tensor, "batch new rope"]) -> bool:
        """Cache new tokens. Returns True if there are earlier ones, so that `attend` must be called. The first call
        takes several tokens, later ones take one each."""
        return self._store(latent, shared, 1)[0] > 0

    def attend(
        self, query: Float[Tensor, "batch heads 1 qk"], weight: Float[Tensor, "rows latent"]
    ) -> Float[Tensor, "batch heads 1 v"]:
        """Attend from the last token to the cached tokens that it sees. `weight` expands latents, by head, to the
        unrotated key and the value."""
        assert self._kept is not None, "append comes first"
        seen = slice(self.pattern.first_visible(self.filled - 1), self.filled)
        latents, shared = (kept[:, None, seen] for kept in self._kept)
        of_key, of_value = weight.unflatten(0, (query.shape[1], -1)).split((self.own_dim, self.v_dim), dim=1)
        own, rotated = query.split((self.own_dim, query.shape[-1] - self.own_dim), dim=-1)
        scores = (own @ of_key) @ latents.mT + rotated @ shared.mT
        shares = (scores.float() * self.scale).softmax(-1).to(query.dtype)
        return (shares @ latents) @ of_value.mT


class RecurrentCache(_Cache):
    """Cache of linear attention: a state per value head, and the last inputs of the convolution. Its size does not
    depend on the sequence's length."""

    def __init__(self) -> None:
        super().__init__(None)
        self._inputs: Tensor | None = None
        self._state: Tensor | None = None

    def convolve(
        self, x: Float[Tensor, "batch new channels"], weight: Float[Tensor, "channels taps"]
    ) -> Float[Tensor, "batch new channels"]:
        """Convolve new tokens with those before them. The first call takes several tokens, later ones take one each."""
        if self.filled == 0:
            self._inputs = nn.functional.pad(x, (0, 0, weight.shape[1] - 1, 0))[:, x.shape[1] :]
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
