"""The blocks that models are built from. Each says how its own parameters start; none knows a mesh."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.models.blocks.initialization import InitSpec
from titan_exp.models.blocks.linear_impl import LinearImpl
from titan_exp.models.spec.tp_plan import (
    Colwise,
    ReplicatedKV,
    Rowwise,
    SequenceParallel,
    TPStyle,
    VocabEmbedding,
    VocabLogits,
)
from titan_exp.ops.attention.rope import rotate
from titan_exp.ops.attention.sdpa import AttentionBackend, CausalAttention
from titan_exp.ops.loss.cross_entropy import LossSum
from titan_exp.ops.swiglu import GROUP, swiglu

LogitsLoss = Callable[[Tensor, Tensor], LossSum]
"""A loss of hidden states [batch, seq, dim] and the head's weight [vocab, dim]."""


class Linear(nn.Linear):
    """A projection without bias that knows its initial standard deviation."""

    def __init__(self, fan_in: int, fan_out: int, std: float) -> None:
        super().__init__(fan_in, fan_out, bias=False)
        self.std = std
        self.linear_impl = LinearImpl()

    def forward(self, input: Float[Tensor, "*any fan_in"]) -> Float[Tensor, "*any fan_out"]:
        """input · weightᵀ, as the product computes it."""
        return self.linear_impl(input, self.weight)

    def init_spec(self) -> dict[str, InitSpec]:
        """How the parameters of this block start, by name."""
        return {"weight": InitSpec("normal", self.std)}


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019), computed in fp32."""

    tp_style = SequenceParallel()

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def init_spec(self) -> dict[str, InitSpec]:
        """How the parameters of this block start, by name."""
        return {"weight": InitSpec("ones")}

    def forward(self, x: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq dim"]:
        """x / rms(x) · weight, in the type of `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Embedding(nn.Module):
    """Token embedding."""

    tp_style = VocabEmbedding()

    def __init__(self, vocab: int, dim: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))
        self.std = std

    def init_spec(self) -> dict[str, InitSpec]:
        """How the parameters of this block start, by name."""
        return {"weight": InitSpec("normal", self.std)}

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq dim"]:
        """Rows of the embedding."""
        return F.embedding(tokens, self.weight)


class Head(nn.Module):
    """What is made of the last hidden states: logits of the next token, or a loss.

    Args:
        dim: width of the hidden states.
        vocab: number of logits.
        std: initial standard deviation.
        tied: whether the weight is the embedding's, handed to `forward`; then the head has no parameter of its own.
    """

    def __init__(self, dim: int, vocab: int, std: float, *, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab, dim))
        self.std = std
        self.tp_style = VocabLogits(vocab)

    def init_spec(self) -> dict[str, InitSpec]:
        """How the parameters of this block start, by name."""
        return {} if self.weight is None else {"weight": InitSpec("normal", self.std)}

    def forward(
        self, x: Float[Tensor, "batch seq dim"], tied: Tensor | None = None, loss: LogitsLoss | None = None
    ) -> Float[Tensor, "batch seq vocab"] | LossSum:
        """Logits, or what `loss` makes of the hidden states and the weight [vocab, dim] instead of their product."""
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head is handed the embedding's weight"
        return F.linear(x, weight) if loss is None else loss(x, weight)


class Attention(nn.Module):
    """Grouped-query self-attention (Ainslie et al. 2023) with one fused projection.

    Rows of `qkv.weight` are ordered by key-value head: its query heads, then its key, then its value; so a contiguous
    slice holds whole groups.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        std: float,
        out_std: float,
        backend: AttentionBackend,
    ) -> None:
        super().__init__()
        self.head_dim, self.kv_heads, self.group = head_dim, kv_heads, heads // kv_heads
        self.qkv = Linear(dim, (heads + 2 * kv_heads) * head_dim, std)
        self.out = Linear(heads * head_dim, dim, out_std)
        self.core = CausalAttention(backend)

    def tp_plan(self) -> dict[str, TPStyle]:
        """How the projections may be divided, by name: whole groups of heads, or a group's query heads."""
        return {"qkv": Colwise(self.kv_heads, ReplicatedKV(self.group, self.head_dim, count="group")), "out": Rowwise()}

    def forward(
        self,
        x: Float[Tensor, "batch part dim"],
        rope: tuple[Float[Tensor, "batch_or_1 seq 1 half"], Float[Tensor, "batch_or_1 seq 1 half"]],
        mask: Any,
    ) -> Float[Tensor, "batch part dim"]:
        """Attend to earlier positions that `mask` (from the core) lets through.

        With sequence parallelism `x` is a rank's part of the tokens, and `rope` and `mask` are of all of them.
        """
        groups = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head_dim))
        query, key, value = groups.split((self.group, 1, 1), dim=-2)
        query, key = rotate(query.flatten(2, 3), *rope), rotate(key.flatten(2, 3), *rope)
        heads = self.core(query.transpose(1, 2), key.transpose(1, 2), value.flatten(2, 3).transpose(1, 2), mask)
        return self.out(heads.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU feed-forward with gate and up fused, their rows alternating in groups (see `ops.swiglu`)."""

    def __init__(self, dim: int, ffn_dim: int, *, std: float, out_std: float) -> None:
        super().__init__()
        assert ffn_dim % GROUP == 0, "checked by the configuration's rules"
        self.gate_up = Linear(dim, 2 * ffn_dim, std)
        self.down = Linear(ffn_dim, dim, out_std)

    def tp_plan(self) -> dict[str, TPStyle]:
        """How the projections may be divided, by name."""
        return {"gate_up": Colwise(self.down.in_features // GROUP), "down": Rowwise()}

    def forward(self, x: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq dim"]:
        """down(silu(gate(x)) · up(x))."""
        return self.down(swiglu(self.gate_up(x)))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, attention: Attention, feed_forward: FeedForward, dim: int, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(dim, norm_eps)
        self.feed_forward = feed_forward

    def forward(
        self,
        x: Float[Tensor, "batch part dim"],
        rope: tuple[Float[Tensor, "batch_or_1 seq 1 half"], Float[Tensor, "batch_or_1 seq 1 half"]],
        mask: Any,
    ) -> Float[Tensor, "batch part dim"]:
        """One layer."""
        x = x + self.attention(self.attention_norm(x), rope, mask)
        return x + self.feed_forward(self.feed_forward_norm(x))
