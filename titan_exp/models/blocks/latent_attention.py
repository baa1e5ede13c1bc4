"""Multi-head latent attention (DeepSeek-AI 2024): keys and values of all heads expanded from one latent per token."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titan_exp.models.blocks.linear import Planned, linear
from titan_exp.models.blocks.transformer import norm
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.models.spec.tp_plan import GatherTokens
from titan_exp.models.spec.transformer import LatentAttentionSpec
from titan_exp.ops.attention.kv_cache import LatentCache
from titan_exp.ops.attention.rope import rotate, rotate_tail
from titan_exp.ops.attention.sdpa import AttentionBackend, CausalAttention
from titan_exp.ops.autograd import local_tensor

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms over latents: the same in every published model, independent of the other norms."""


class TokenGather(nn.Identity):
    """Identity that tensor parallelism replaces by a gather of tokens."""

    tp_style = GatherTokens()


class LatentGather(nn.Identity):
    """Identity that context parallelism may replace by a gather of the whole sequence's latents."""


class LatentAttention(Planned):
    """Multi-head latent attention, causal; queries may have a latent of their own. Rows of `q.weight` go by head
    (unrotated features, rotated features), rows of `kv_b.weight` by head (unrotated features of its key, its value),
    and rows of `kv_a.weight` are the latent, then the rotated key of all heads."""

    def __init__(self, layer: LayerSpec, backend: AttentionBackend) -> None:
        super().__init__(layer, "attention")
        spec = layer.attention
        assert isinstance(spec, LatentAttentionSpec), "the layer has latent attention"
        assert not spec.sinks
        self.spec = spec
        has_query_latent = layer.vector("attention.q_a_norm") is not None
        self.q_a = linear(layer, "attention.q_a") if has_query_latent else None
        self.q_a_norm = norm(layer, "attention.q_a_norm", LATENT_NORM_EPS) if has_query_latent else None
        self.q = linear(layer, "attention.q")
        self.kv_a = linear(layer, "attention.kv_a")
        self.kv_a_norm = norm(layer, "attention.kv_a_norm", LATENT_NORM_EPS)
        self.gather = TokenGather()
        self.latent_gather = LatentGather()
        self.kv_b = linear(layer, "attention.kv_b")
        self.out = linear(layer, "attention.out")
        self.core = CausalAttention(backend, spec.scale, spec.pattern)
        self.cache: LatentCache | None = None
        """Cache of earlier tokens' latents, in generation."""

    def enable_cache(self, length: int) -> LatentCache:
        assert self.spec.scale is not None, "latent attention names its scale"
        own_dim = self.spec.qk_dim - self.spec.rope_dim
        self.cache = LatentCache(
            length, own_dim=own_dim, v_dim=self.spec.v_dim, scale=self.spec.scale, pattern=self.spec.pattern
        )
        return self.cache

    def forward(
        self,
        x: Float[Tensor, "batch part dim"],
        rope: tuple[Float[Tensor, "batch_or_1 seq 1 ..."], ...] | None,
        mask: Any,
    ) -> Float[Tensor, "batch part dim"]:
        """Attend to earlier positions that `mask` (from the core) lets through. With sequence parallelism `x` is this
        rank's part of the tokens, while `rope` and `mask` cover all."""
        rope = rope or ()
        of_query = x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x))
        query = self.q(of_query).unflatten(-1, (-1, self.spec.qk_dim))
        query = (rotate_tail(query, *rope[:2]) if self.spec.rope else query).transpose(1, 2)
        widths = (self.spec.latent_dim, self.spec.rope_dim)
        latent, shared = self.kv_a(x).split(widths, dim=-1)
        # One message under tensor parallelism.
        latent, shared = self.gather(torch.cat((self.kv_a_norm(latent), shared), dim=-1)).split(widths, dim=-1)
        if self.spec.rope:
            shared = rotate(shared[:, :, None], *rope[:2])[:, :, 0]
        if type(self.latent_gather) is not LatentGather:
            latent, shared = self.latent_gather(torch.cat((latent, shared), dim=-1)).split(widths, dim=-1)
        if self.cache is not None and self.cache.append(latent, shared):
            heads = self.cache.attend(query, local_tensor(self.kv_b.weight))
        else:
            # Keys and values of this rank's heads.
            widths = self.spec.qk_dim - self.spec.rope_dim, self.spec.v_dim
            own, value = self.kv_b(latent).unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)
            key = torch.cat((own, shared[:, :, None].expand(*own.shape[:-1], -1)), dim=-1)
            heads = self.core(query, key.transpose(1, 2), value.transpose(1, 2), mask)
        return self.out(heads.transpose(1, 2).flatten(2))

    def clip_factors(self, factors: Float[Tensor, " heads"]) -> dict[str, Float[Tensor, " rows"]]:
        """Factors of the rows of `q` and `kv_b` that multiply the logits of each head by its factor (Kimi Team 2025).
        The unrotated features of queries and keys take its root each. Rotated queries take all of it, since heads share
        the rotated key."""
        root, one = factors.sqrt()[:, None], torch.ones_like(factors)[:, None]
        own_dim = self.spec.qk_dim - self.spec.rope_dim
        query = torch.cat((root.expand(-1, own_dim), factors[:, None].expand(-1, self.spec.rope_dim)), dim=1)
        key = torch.cat((root.expand(-1, own_dim), one.expand(-1, self.spec.v_dim)), dim=1)
        return {"q": query.flatten(), "kv_b": key.flatten()}
