"""Linear attention by the gated delta rule: Gated DeltaNet (Yang et al. 2024) and Kimi Delta Attention (Kimi Team
2025).

Queries, keys and values go through a causal convolution per channel. A state per value head decays, is corrected along
the key and read by the query; the output is normalized per head and gated.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.models.blocks.latent_attention import TokenGather
from titan_exp.models.blocks.linear import InitSpec, Planned, linear
from titan_exp.models.blocks.transformer import HeadNumbers, norm
from titan_exp.models.spec.mixers import CHUNK, LinearAttentionSpec
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.ops import linear_attention as delta_rule
from titan_exp.ops.attention.kv_cache import RecurrentCache

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
