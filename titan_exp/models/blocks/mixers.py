"""Mixers of a layer beside plain softmax attention: latent attention, and linear attention.

Multi-head latent attention (DeepSeek-AI 2024) expands keys and values of all heads from one latent per token.

Linear attention by the gated delta rule is Gated DeltaNet (Yang et al. 2024) or Kimi Delta Attention (Kimi Team 2025).
Queries, keys and values go through a causal convolution per channel. A state per value head decays, is corrected along
the key and read by the query; the output is normalized per head and gated.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.models.blocks.linear import InitSpec, Planned, linear
from titan_exp.models.blocks.transformer import HeadNumbers, norm
from titan_exp.models.spec.mixers import CHUNK, LinearAttentionSpec
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.models.spec.tp_plan import GatherTokens
from titan_exp.models.spec.transformer import LatentAttentionSpec
from titan_exp.ops import linear_attention as delta_rule
from titan_exp.ops.attention.kv_cache import LatentCache, RecurrentCache
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


Hidden = Float[Tensor, "batch part dim"]
Documents = Int[Tensor, "batch seq"]


class Filters(HeadNumbers):
    """Filters of a causal convolution per channel; the last tap is that of the token itself."""

    parameter_role = "vector"

    def __init__(self, channels: int, taps: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.std = std

    def init_spec(self) -> dict[str, InitSpec]:
        return {"weight": InitSpec("normal", self.std)}

    def forward(self) -> Float[Tensor, "channels taps"]:
        return self.of_rank("weight")


class ForgetGate(HeadNumbers):
    """Decay of the state per token, in logarithm: -exp(log_rate) · softplus(x + bias), in fp32 (Dao and Gu 2024). The
    bias has a number per decay, the rate one per value head. Both stay in fp32 under mixed precision, because rounding
    a rate to bf16 would change it by up to 0.8 %."""

    parameter_role = "vector"
    keeps_fp32 = True  # True if mixed precision leaves the module's parameters in fp32

    def __init__(self, spec: LinearAttentionSpec) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.empty(spec.value_heads))
        self.bias = nn.Parameter(torch.empty(spec.decays))
        self.spec = spec

    def init_spec(self) -> dict[str, InitSpec]:
        steps = self.spec.steps
        bias = InitSpec("ones") if steps is None else InitSpec("inverse_softplus", bounds=steps)
        return {"log_rate": InitSpec("log_uniform", bounds=self.spec.rates), "bias": bias}

    def forward(self, x: Float[Tensor, "batch seq decays"]) -> Float[Tensor, "batch seq heads *key_dim"]:
        """Logarithm of the decay of each value head, or of each feature of its key."""
        wide = torch.promote_types(x.dtype, torch.float32)
        rate, step = self.of_rank("log_rate").to(wide).exp(), F.softplus(x.to(wide) + self.of_rank("bias").to(wide))
        if self.spec.decay == "channel":
            return -rate[:, None] * step.unflatten(-1, (-1, self.spec.key_dim))
        return -rate * step


class LinearAttention(Planned):
    """Gated DeltaNet, or Kimi Delta Attention if the state decays per feature of a key. Rows of `qkv.weight` and
    filters of `convolution` go by key head (its query, its key, the values of its value heads), so that a contiguous
    slice holds whole heads. Context parallelism replaces the two cores."""

    pattern = "documents"  # kind of mask: the document of each token

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer, "attention")
        spec = layer.linear_attention
        assert spec is not None, "the layer has linear attention"
        self.spec = spec
        self.gather = TokenGather()
        self.qkv = linear(layer, "attention.qkv")
        self.convolution = Filters(spec.channels, spec.taps, layer.linear("attention.qkv").std)
        self.beta = linear(layer, "attention.beta")
        by_channel = spec.decay == "channel"
        names = ("decay_a", "decay_b", "gate_a", "gate_b") if by_channel else ("decay", "gate")
        built = {name: linear(layer, f"attention.{name}") for name in names}
        self.decay, self.gate = built.get("decay"), built.get("gate")
        self.decay_a, self.decay_b = built.get("decay_a"), built.get("decay_b")
        self.gate_a, self.gate_b = built.get("gate_a"), built.get("gate_b")
        self.forget = ForgetGate(spec)
        self.out_norm = norm(layer, "attention.out_norm", spec.norm_eps)
        self.out = linear(layer, "attention.out")
        self.convolution_core = delta_rule.ShortConvolutionCore()
        self.core = delta_rule.GatedDeltaCore(chunk=CHUNK)
        self.cache: RecurrentCache | None = None
        """Cache of the state, in generation."""

    def reset_buffers(self) -> None:
        """Choose the kernels once the parameters are on their device."""
        self.core.backend = delta_rule.choose_linear_attention_backend(self.spec.backend, self.out_norm.weight.device)

    def enable_cache(self, length: int) -> RecurrentCache:
        self.cache = RecurrentCache()
        return self.cache

    def mask(
        self,
        documents: Documents | None,
        positions: Documents | None = None,
        *,
        seq: int = 0,
        device: torch.device | None = None,
    ) -> Documents | None:
        """Argument `mask` of `forward`: the documents themselves, since the state starts anew with each."""
        return documents

    def forward(self, x: Hidden, rope: Any, mask: Documents | None) -> Hidden:
        """Read the states of earlier tokens of the same document, whose numbers are in `mask`. With sequence
        parallelism `x` is this rank's part of the tokens, while `mask` covers all."""
        spec, cache, whole = self.spec, self.cache, self.gather(x)
        inputs, filters = self.qkv(whole), self.convolution()
        mixed = self.convolution_core(inputs, filters, mask) if cache is None else cache.convolve(inputs, filters)
        widths = (spec.key_dim, spec.key_dim, spec.group * spec.value_dim)
        query, key, value = mixed.unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)
        query, key = delta_rule.l2_normalized(query, spec.key_dim**-0.5), delta_rule.l2_normalized(key)
        value = value.unflatten(-1, (spec.group, spec.value_dim)).flatten(2, 3)
        forget, gate = self._gates(x, whole)
        beta = self.beta(whole).to(forget.dtype).sigmoid() * spec.strongest_write
        if cache is None:
            out = self.core(query, key, value, forget, beta, mask)
        else:
            out = cache.attend(query, key, value, (forget, beta))
        activate = F.silu if spec.gate == "silu" else torch.sigmoid
        gate = activate(gate.to(forget.dtype)).unflatten(-1, (-1, spec.value_dim))
        return self.out((self.out_norm(out) * gate).to(x.dtype).flatten(2))

    def _gates(self, x: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of the decay, and the gate before its function, of all tokens."""
        if self.decay is not None and self.gate is not None:
            return self.forget(self.decay(whole)), self.gate(whole)
        assert self.decay_a is not None
        assert self.decay_b is not None
        assert self.gate_a is not None
        assert self.gate_b is not None
        return self.forget(self.decay_b(self.decay_a(x))), self.gate_b(self.gate_a(x))
