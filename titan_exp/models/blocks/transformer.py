"""Transformer building blocks: linear, norm, embedding, LM head, attention, feed-forward. None knows a mesh."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.models.blocks.initialization import InitSpec
from titan_exp.models.blocks.linear_impl import LinearImpl
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.models.spec.tp_plan import (
    SEQUENCE_PARALLEL,
    HeadParallel,
    SequenceParallel,
    TPStyle,
    VocabEmbedding,
    VocabLogits,
)
from titan_exp.models.spec.transformer import FFN_GROUP
from titan_exp.ops.attention.rope import rotate
from titan_exp.ops.attention.sdpa import AttentionBackend, CausalAttention
from titan_exp.ops.loss.cross_entropy import LossSum
from titan_exp.ops.swiglu import GROUP, swiglu

LogitsLoss = Callable[[Tensor, Tensor], LossSum]
"""Loss of hidden states [batch, seq, dim] and the head's weight [vocab, dim]."""


class Linear(nn.Linear):
    """A linear layer without bias, initialized with standard deviation `std`."""

    def __init__(self, fan_in: int, fan_out: int, std: float) -> None:
        super().__init__(fan_in, fan_out, bias=False)
        self.std = std
        self.linear_impl = LinearImpl()

    def forward(self, input: Float[Tensor, "*any fan_in"]) -> Float[Tensor, "*any fan_out"]:
        """input · weightᵀ, by `linear_impl`."""
        return self.linear_impl(input, self.weight)

    def init_spec(self) -> dict[str, InitSpec]:
        """Initialization of the parameters by name."""
        return {"weight": InitSpec("normal", self.std)}


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019), computed in fp32."""

    def __init__(self, dim: int, eps: float, tp_style: SequenceParallel | HeadParallel = SEQUENCE_PARALLEL) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.tp_style = eps, tp_style

    def init_spec(self) -> dict[str, InitSpec]:
        """Initialization of the parameters by name."""
        return {"weight": InitSpec("ones")}

    def forward(self, x: Float[Tensor, "*any dim"]) -> Float[Tensor, "*any dim"]:
        """x / rms(x) · weight, in the dtype of `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Embedding(nn.Module):
    """Token embedding."""

    tp_style = VocabEmbedding()
    parameter_role = "embedding"

    def __init__(self, vocab: int, dim: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))
        self.std = std

    def init_spec(self) -> dict[str, InitSpec]:
        """Initialization of the parameters by name."""
        return {"weight": InitSpec("normal", self.std)}

    def forward(self, tokens: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq dim"]:
        """Rows of the embedding."""
        return F.embedding(tokens, self.weight)


class Head(nn.Module):
    """LM head: logits of the next token, or a loss, from the last hidden states.

    A `tied` head has no parameter; `forward` gets the embedding's weight.
    """

    parameter_role = "head"

    def __init__(self, dim: int, vocab: int, std: float, *, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab, dim))
        self.std = std
        self.tp_style = VocabLogits(vocab)

    def init_spec(self) -> dict[str, InitSpec]:
        """Initialization of the parameters by name."""
        return {} if self.weight is None else {"weight": InitSpec("normal", self.std)}

    def forward(
        self, x: Float[Tensor, "batch seq dim"], tied: Tensor | None = None, loss: LogitsLoss | None = None
    ) -> Float[Tensor, "batch seq vocab"] | LossSum:
        """Logits, or `loss` of the hidden states and the weight [vocab, dim]."""
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head gets the embedding's weight"
        return F.linear(x, weight) if loss is None else loss(x, weight)


class Attention(nn.Module):
    """Grouped-query self-attention (Ainslie et al. 2023) with one fused projection.

    Rows of `qkv.weight` are ordered by key-value head (its query heads, its key, its value), so that a contiguous slice
    holds whole groups. Layers with QK norm normalize query and key heads before RoPE.
    """

    def __init__(self, layer: LayerSpec, norm_eps: float, backend: AttentionBackend) -> None:
        super().__init__()
        assert layer.attention is not None, "the layer has attention"
        self._plan = layer.tp_plan("attention")
        self.head_dim, self.group = layer.attention.qk_dim, layer.attention.group
        self.qkv = _linear(layer, "attention.qkv")
        self.q_norm = _head_norm(layer, "attention.q_norm", norm_eps)
        self.k_norm = _head_norm(layer, "attention.k_norm", norm_eps)
        self.out = _linear(layer, "attention.out")
        self.core = CausalAttention(backend)

    def tp_plan(self) -> dict[str, TPStyle]:
        """Tensor-parallel sharding of the linears: whole groups of heads, or a group's query heads."""
        return self._plan

    def forward(
        self,
        x: Float[Tensor, "batch part dim"],
        rope: tuple[Float[Tensor, "batch_or_1 seq 1 half"], Float[Tensor, "batch_or_1 seq 1 half"]],
        mask: Any,
    ) -> Float[Tensor, "batch part dim"]:
        """Attend to earlier positions that `mask` (from the core) lets through.

        With sequence parallelism `x` is this rank's part of the tokens, while `rope` and `mask` cover all.
        """
        groups = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.head_dim))
        query, key, value = groups.split((self.group, 1, 1), dim=-2)
        query, key = query.flatten(2, 3), key.flatten(2, 3)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, *rope), rotate(key, *rope)
        heads = self.core(query.transpose(1, 2), key.transpose(1, 2), value.flatten(2, 3).transpose(1, 2), mask)
        return self.out(heads.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU feed-forward with gate and up fused, their rows alternating in groups (see `ops.swiglu`)."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__()
        assert FFN_GROUP == GROUP, "rows are fused as the operator reads them"
        assert layer.linear("feed_forward.down").inputs % GROUP == 0, "checked by the family's rules"
        self._plan = layer.tp_plan("feed_forward")
        self.group = GROUP
        self.gate_up = _linear(layer, "feed_forward.gate_up")
        self.down = _linear(layer, "feed_forward.down")

    def tp_plan(self) -> dict[str, TPStyle]:
        """Tensor-parallel sharding of the linears."""
        return self._plan

    def forward(self, x: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq dim"]:
        """down(silu(gate(x)) · up(x))."""
        return self.down(swiglu(self.gate_up(x), self.group))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, layer: LayerSpec, norm_eps: float, backend: AttentionBackend) -> None:
        super().__init__()
        self.attention_norm = _norm(layer, "attention_norm", norm_eps)
        self.attention = Attention(layer, norm_eps, backend)
        self.feed_forward_norm = _norm(layer, "feed_forward_norm", norm_eps)
        self.feed_forward = FeedForward(layer)

    def forward(
        self,
        x: Float[Tensor, "batch part dim"],
        rope: tuple[Float[Tensor, "batch_or_1 seq 1 half"], Float[Tensor, "batch_or_1 seq 1 half"]],
        mask: Any,
    ) -> Float[Tensor, "batch part dim"]:
        """One layer."""
        x = x + self.attention(self.attention_norm(x), rope, mask)
        return x + self.feed_forward(self.feed_forward_norm(x))


def _linear(layer: LayerSpec, name: str) -> Linear:
    spec = layer.linear(name)
    return Linear(spec.inputs, spec.outputs, spec.std)


def _norm(layer: LayerSpec, name: str, eps: float) -> "RMSNorm":
    vector = layer.vector(name)
    assert vector is not None, f"the layer has {name}"
    return RMSNorm(vector.size, eps, vector.tp)


def _head_norm(layer: LayerSpec, name: str, eps: float) -> "RMSNorm | None":
    return None if layer.vector(name) is None else _norm(layer, name, eps)
