"""Blocks of a diffusion transformer (Esser et al. 2024, FLUX.1): modulation, joint attention, double and single block.

A block is called as `block(x, conditioning, rope, text_tokens)`, where `x` are text tokens, then image tokens. With
sequence parallelism both are this rank's, and its linears gather them.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from titan_exp.models.blocks.linear import linear
from titan_exp.models.blocks.token_order import Rope, RopeOrder
from titan_exp.models.blocks.transformer import norm
from titan_exp.models.spec.fused_rows import FusedRows
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.models.spec.tp_plan import TPStyle
from titan_exp.ops.attention.rope import rotate
from titan_exp.ops.attention.sdpa import AttentionBackend, CausalAttention


def modulate(
    x: Float[Tensor, "batch seq dim"],
    shift: Float[Tensor, "batch 1 dim"],
    scale: Float[Tensor, "batch 1 dim"],
    eps: float,
) -> Float[Tensor, "batch seq dim"]:
    """LayerNorm without weights, then (1 + scale) · x + shift."""
    return F.layer_norm(x, x.shape[-1:], eps=eps) * (1 + scale) + shift


def modulation(module: nn.Module, conditioning: Float[Tensor, "batch dim"], parts: int) -> tuple[Tensor, ...]:
    """Shifts, scales and gates [batch, 1, dim] of a sequence, in this order, from its conditioning."""
    return module(conditioning)[:, None].chunk(parts, dim=-1)


class JointAttention(nn.Module):
    """Full attention over text and image tokens, with RoPE; without linears."""

    def __init__(self, layer: LayerSpec, backend: AttentionBackend) -> None:
        super().__init__()
        assert layer.attention is not None, "the layer has attention"
        self.core = CausalAttention(backend, layer.attention.scale, layer.attention.pattern)

    def forward(
        self,
        query: Float[Tensor, "batch seq heads width"],
        key: Float[Tensor, "batch seq heads width"],
        value: Float[Tensor, "batch seq heads width"],
        rope: Rope,
    ) -> Float[Tensor, "batch seq heads width"]:
        """Heads of every token."""
        heads = (rotate(query, *rope), rotate(key, *rope), value)
        return self.core(*(part.transpose(1, 2) for part in heads)).transpose(1, 2)


class _Heads(nn.Module):
    """Fused projection to queries, keys, values and more by head, with QK norm."""

    def __init__(self, layer: LayerSpec, prefix: str, projection: str, eps: float) -> None:
        super().__init__()
        rows = layer.linear(f"{prefix}{projection}").rows
        assert rows is not None, "the projection is fused"
        self.projection, self.rows = projection, rows
        self.add_module(projection, linear(layer, f"{prefix}{projection}"))
        self.q_norm = norm(layer, f"{prefix}q_norm", eps)
        self.k_norm = norm(layer, f"{prefix}k_norm", eps)

    @property
    def fused_rows(self) -> dict[str, FusedRows]:
        """Row layout of the fused weight."""
        return {self.projection: self.rows}

    def heads(self, x: Float[Tensor, "batch seq dim"]) -> list[Float[Tensor, "batch seq heads _"]]:
        """Queries and keys after their norms, values, and what else the rows hold."""
        fused = self.get_submodule(self.projection)(x).unflatten(-1, (-1, self.rows.unit))
        query, key, *others = fused.split([piece.width for piece in self.rows.pieces], dim=-1)
        return [self.q_norm(query), self.k_norm(key), *others]


class Stream(_Heads):
    """Weights of a double block for text or image tokens."""

    def __init__(self, layer: LayerSpec, name: str, eps: float) -> None:
        super().__init__(layer, f"{name}.", "qkv", eps)
        self.eps = eps
        self._plan = layer.tp_plan(name)
        self.modulation = linear(layer, f"{name}.modulation")
        self.out = linear(layer, f"{name}.out")
        self.up = linear(layer, f"{name}.up")
        self.down = linear(layer, f"{name}.down")

    def tp_plan(self) -> dict[str, TPStyle]:
        """Tensor-parallel sharding of the linears, by heads and channels."""
        return self._plan

    def after_attention(
        self, x: Float[Tensor, "batch tokens dim"], attended: Tensor, modulations: tuple[Tensor, ...]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Residual stream after attention's output and the feed-forward."""
        gate, shift, scale, feed_forward_gate = modulations
        x = x + gate * self.out(attended)
        hidden = F.gelu(self.up(modulate(x, shift, scale, self.eps)), approximate="tanh")
        return x + feed_forward_gate * self.down(hidden)


class DoubleBlock(nn.Module):
    """Attention of text and image tokens together, between linears and feed-forwards of their own."""

    def __init__(self, layer: LayerSpec, eps: float, backend: AttentionBackend) -> None:
        super().__init__()
        self.text, self.image = Stream(layer, "text", eps), Stream(layer, "image", eps)
        self.attention = JointAttention(layer, backend)

    def forward(
        self, x: Float[Tensor, "batch seq dim"], conditioning: Float[Tensor, "batch dim"], rope: Rope, text_tokens: int
    ) -> Float[Tensor, "batch seq dim"]:
        """One layer."""
        streams, lengths = (self.text, self.image), (text_tokens, x.shape[1] - text_tokens)
        parts = x.split(lengths, dim=1)
        modulations = [modulation(stream.modulation, conditioning, 6) for stream in streams]
        heads = [
            stream.heads(modulate(part, shift, scale, stream.eps))
            for stream, part, (shift, scale, *_) in zip(streams, parts, modulations, strict=True)
        ]
        query, key, value = (torch.cat(pair, dim=1) for pair in zip(*heads, strict=True))
        gathered = [stream_query.shape[1] for stream_query, *_ in heads]
        attended = self.attention(query, key, value, rope).flatten(2).split(gathered, dim=1)
        outputs = [
            stream.after_attention(part, of_part, found[2:])
            for stream, part, of_part, found in zip(streams, parts, attended, modulations, strict=True)
        ]
        return torch.cat(outputs, dim=1)


class SingleBlock(_Heads):
    """Attention and feed-forward of all tokens side by side, between one linear before and one after.

    Both linears hold a head's attention beside its channels of the feed-forward, so that heads can be divided.
    """

    def __init__(self, layer: LayerSpec, eps: float, backend: AttentionBackend) -> None:
        super().__init__(layer, "", "qkv_up", eps)
        self.eps, self._plan = eps, layer.tp_plan("")
        self.modulation = linear(layer, "modulation")
        self.rope_order = RopeOrder()
        self.attention = JointAttention(layer, backend)
        self.out = linear(layer, "out")

    def tp_plan(self) -> dict[str, TPStyle]:
        """Tensor-parallel sharding of the linears, by heads."""
        return self._plan

    def forward(
        self, x: Float[Tensor, "batch seq dim"], conditioning: Float[Tensor, "batch dim"], rope: Rope, text_tokens: int
    ) -> Float[Tensor, "batch seq dim"]:
        """One layer; text and image tokens are computed alike."""
        shift, scale, gate = modulation(self.modulation, conditioning, 3)
        query, key, value, up = self.heads(modulate(x, shift, scale, self.eps))
        rope = self.rope_order(rope, text_tokens)
        hidden = torch.cat((self.attention(query, key, value, rope), F.gelu(up, approximate="tanh")), dim=-1)
        return x + gate * self.out(hidden.flatten(2))
