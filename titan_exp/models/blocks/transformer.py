"""Transformer building blocks: norm, embedding, LM head, attention, block, and iterators over a model's blocks."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from titan_exp.models.blocks.feed_forward import FeedForward, MoEFeedForward
from titan_exp.models.blocks.linear import InitSpec, Planned, linear
from titan_exp.models.spec import tp_plan as styles
from titan_exp.models.spec.model_spec import LayerSpec
from titan_exp.ops.attention import rope as tables
from titan_exp.ops.attention.rope import rotate, rotate_front, split_rotated
from titan_exp.ops.attention.sdpa import AttentionBackend, CausalAttention
from titan_exp.ops.autograd import embedding_rows, local_tensor, recompute_input
from titan_exp.ops.cross_entropy import LossSum

Hidden = Float[Tensor, "batch part dim"]
Heads = Float[Tensor, "batch seq heads head_dim"]
Keys = Float[Tensor, "batch seq kv_heads head_dim"]
Rope = tuple[Float[Tensor, "batch_or_1 seq 1 ..."], ...]

LogitsLoss = Callable[[Tensor, Tensor], LossSum | tuple[LossSum, ...]]
"""Computes the loss of hidden states [batch, seq, dim] and the head's weight [vocab, dim], or losses of parts of the
batch."""


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019), computed in fp32. `writes_residual` and `zero_centered` are the
    spec's."""

    def __init__(
        self,
        dim: int,
        eps: float,
        tp_style: styles.TPStyle = styles.SEQUENCE_PARALLEL,
        *,
        writes_residual: bool = False,
        zero_centered: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps, self.tp_style = eps, tp_style
        self.writes_residual, self.zero_centered = writes_residual, zero_centered

    def init_spec(self) -> dict[str, InitSpec]:
        return {"weight": InitSpec("zeros" if self.zero_centered else "ones")}

    def forward(self, x: Float[Tensor, "*any dim"]) -> Float[Tensor, "*any dim"]:
        """x / rms(x) · weight, or · (1 + weight), in the dtype of `x`."""
        if not self.zero_centered:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # One plus a small weight would lose the weight's digits in bf16.
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.weight.shape, 1 + self.weight.to(wide), self.eps).to(x.dtype)


class Embedding(nn.Module):
    """Token embedding."""

    tp_style = styles.VocabEmbedding()
    parameter_role = "embedding"
    reads_weight_in_backward = False
    """True if FSDP must gather the weight for backward; a lookup's backward only needs token ids."""
    row_dtype: torch.dtype | None = None
    """Dtype that looked-up rows are rounded to; None is the weight's."""

    def __init__(self, vocab: int, dim: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))
        self.std = std

    def init_spec(self) -> dict[str, InitSpec]:
        return {"weight": InitSpec("normal", self.std)}

    def forward(
        self,
        x: Int[Tensor, "batch seq"] | Float[Tensor, "batch seq dim"],
        head: nn.Module | None = None,
        loss: LogitsLoss | None = None,
    ) -> Float[Tensor, "batch seq dim"] | Float[Tensor, "batch seq vocab"] | LossSum | tuple[LossSum, ...]:
        """Rows of the embedding for token ids; for hidden states, the result of a `head` tied to this weight. Both uses
        are calls of this module, because FSDP gathers its weight for the time of a call."""
        return embedding_rows(x, self.weight, self.row_dtype) if head is None else head(x, self.weight, loss)


class Head(nn.Module):
    """LM head: logits of the next token, or a loss, from the last hidden states. A `tied` head has no parameter;
    `forward` gets the embedding's weight."""

    parameter_role = "head"

    def __init__(self, dim: int, vocab: int, std: float, *, tied: bool) -> None:
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(vocab, dim))
        self.std = std
        self.tp_style = styles.VocabLogits(vocab)

    def init_spec(self) -> dict[str, InitSpec]:
        return {} if self.weight is None else {"weight": InitSpec("normal", self.std)}

    def forward(
        self, x: Float[Tensor, "batch seq dim"], tied: Tensor | None = None, loss: LogitsLoss | None = None
    ) -> Float[Tensor, "batch seq vocab"] | LossSum | tuple[LossSum, ...]:
        """Logits, or `loss` of the hidden states and the weight [vocab, dim]."""
        weight = self.weight if tied is None else tied
        assert weight is not None, "a tied head gets the embedding's weight"
        return F.linear(x, weight) if loss is None else loss(x, weight)


class HeadNumbers(nn.Module):
    """Parameters of numbers per head, which tensor parallelism shards with the heads."""

    tp_style = styles.HeadSharded()

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, slice] = {}
        """Rows of this rank by name, for parameters that hold those of all heads."""

    def of_rank(self, name: str) -> Float[Tensor, "rows *rest"]:
        """Rows of this rank's heads in a parameter."""
        whole = local_tensor(getattr(self, name))
        return whole[self.rows[name]] if name in self.rows else whole


class AttentionSinks(HeadNumbers):
    """Attention sinks: one learned logit per query head, beside the keys."""

    def __init__(self, heads: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))
        self.std = std

    def init_spec(self) -> dict[str, InitSpec]:
        return {"weight": InitSpec("normal", self.std)}

    def forward(self) -> Float[Tensor, " heads"]:
        return self.of_rank("weight")


class Attention(Planned):
    """Grouped-query self-attention (Ainslie et al. 2023) with one fused projection.

    Rows of `qkv.weight` are ordered by key-value head (its query heads, its key, its value), so that a contiguous slice
    holds whole groups. QK norm, if any, normalizes query and key heads before RoPE, each by itself or all at once; a
    norm without weight may follow RoPE. A gate, if any, follows its query head.
    """

    def __init__(self, layer: LayerSpec, norm_eps: float, backend: AttentionBackend) -> None:
        super().__init__(layer, "attention")
        assert layer.attention is not None, "the layer has attention"
        self.spec = layer.attention
        self.head_dim, self.group = layer.attention.qk_dim, layer.attention.group
        self.qkv = linear(layer, "attention.qkv")
        self.q_norm, self.k_norm = (
            norm(layer, name, norm_eps) if layer.vector(name) else None
            for name in ("attention.q_norm", "attention.k_norm")
        )
        self._across_heads = self.q_norm is not None and self.q_norm.weight.numel() > self.head_dim
        self.out = linear(layer, "attention.out")
        sinks = layer.vector("attention.sinks")
        assert (sinks is not None) == self.spec.sinks, "described twice"
        self.sinks = None if sinks is None or sinks.std is None else AttentionSinks(sinks.size, sinks.std)
        self.core = CausalAttention(backend, self.spec.scale, self.spec.pattern)

    def forward(self, x: Hidden, rope: Rope | None, mask: Any) -> Hidden:
        """Attend to earlier positions that `mask` (from the core) lets through. `rope` are cosines and sines, followed
        by the factor of queries if the model scales them by position, and None without RoPE. With sequence parallelism
        `x` is this rank's part of the tokens; `rope` and `mask` cover all."""
        spec, gate, rope = self.spec, None, rope or ()
        slots = self.group * (1 + spec.gated)
        groups = self.qkv(x).unflatten(-1, (-1, slots + 2, self.head_dim))
        plain = self.q_norm is None and not spec.gated and spec.rotary_dim is None
        if plain and spec.rope and spec.rotated_norm_eps is spec.temperature is None:
            query, key, value = split_rotated(groups, *rope[:2])
        else:
            # Backward of the norms keeps the projection's output, and with it the values' memory.
            query, key, value = (heads.flatten(2, 3) for heads in groups.split((slots, 1, 1), dim=-2))
            if spec.gated:
                query, gate = query.unflatten(2, (-1, 2)).unbind(3)
            query, key = self._normalized(query, key, rope)
        heads = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask)
        out = self.core(*heads) if self.sinks is None else self.core(*heads, self.sinks())
        out = out.transpose(1, 2)
        return self.out((out if gate is None else out * gate.sigmoid()).flatten(2))

    def clip_factors(self, factors: Float[Tensor, " heads"]) -> dict[str, Float[Tensor, " rows"]]:
        """Factors of the rows of `qkv` that multiply the logits of each query head by its factor. A key head with a
        single query head takes its root; a shared key head is left alone."""
        # Rows of the whole weight; `group` is this rank's where tensor parallelism splits a group.
        queries, width = factors.view(-1, self.spec.group), self.head_dim
        keys = torch.ones_like(queries[:, :1])
        if self.spec.group == 1:
            queries = keys = queries.sqrt()
        rows = torch.cat((queries, keys, torch.ones_like(keys)), dim=1)
        return {"qkv": rows.repeat_interleave(width, dim=1).flatten()}

    def _normalized(self, query: Heads, key: Keys, rope: Rope) -> tuple[Heads, Keys]:
        """Apply the layer's norms, RoPE and temperature to query and key heads."""
        if self.q_norm is not None and self.k_norm is not None:
            if self._across_heads:
                query = self.q_norm(query.flatten(2)).view_as(query)
                key = self.k_norm(key.flatten(2)).view_as(key)
            else:
                query, key = self.q_norm(query), self.k_norm(key)
        if self.spec.rope and self.spec.rotary_dim is not None:
            query, key = rotate_front(query, *rope[:2]), rotate_front(key, *rope[:2])
        elif self.spec.rope:
            query, key = rotate(query, *rope[:2]), rotate(key, *rope[:2])
        if self.spec.rotated_norm_eps is not None:
            query, key = (
                F.rms_norm(heads, heads.shape[-1:], None, self.spec.rotated_norm_eps) for heads in (query, key)
            )
        if self.spec.temperature is not None:
            query = (query * rope[2]).to(query.dtype)
        return query, key


class TransformerBlock(nn.Module):
    """Transformer block: attention and feed-forward, each added to the residual stream. Norms come before (pre-norm),
    or after if the spec says that they write to the stream. `attention` replaces grouped-query attention by a module
    with the same arguments, such as linear attention."""

    def __init__(
        self, layer: LayerSpec, norm_eps: float, backend: AttentionBackend, attention: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.attention_norm = norm(layer, "attention_norm", norm_eps)
        self.attention = Attention(layer, norm_eps, backend) if attention is None else attention
        self.feed_forward_norm = norm(layer, "feed_forward_norm", norm_eps)
        self.feed_forward = FeedForward(layer) if layer.router is None else MoEFeedForward(layer)

    def forward(self, x: Hidden, rope: Rope | None, mask: Any) -> Hidden:
        x = x + _branch(self.attention_norm, x, partial(self.attention, rope=rope, mask=mask))
        return x + _branch(self.feed_forward_norm, x, self.feed_forward)


def _branch(norm: RMSNorm, x: Tensor, module: Callable[[Tensor], Tensor]) -> Tensor:
    """norm(module(x)) if the norm writes to the residual stream, else module(norm(x)). The latter recomputes the norm
    in backward unless it has hooks, such as those that gather its weight."""
    if norm.writes_residual:
        return norm(module(x))
    if norm._forward_hooks or norm._forward_pre_hooks:
        return module(norm(x))
    return recompute_input(norm, x, module)


def norm(layer: LayerSpec, name: str, eps: float) -> "RMSNorm":
    """Build the norm that a block's spec describes, by module path."""
    vector = layer.vector(name)
    assert vector is not None, f"the layer has {name}"
    return RMSNorm(
        vector.size, eps, vector.tp, writes_residual=vector.writes_residual, zero_centered=vector.zero_centered
    )


class MTPModule(TransformerBlock):
    """Module of multi-token prediction: a block over the previous depth's hidden states joined with embeddings of the
    next tokens, and its output norm.

    Hidden states are those that a head reads: after the model's final norm for the first module, after `norm` for the
    next. The report says only "the representation given by the main model"; vLLM, SGLang and llama.cpp decode the
    published weights from after the norm. As in those weights, the embedding is the first half of the projection's
    input.
    """

    def __init__(
        self, layer: LayerSpec, norm_eps: float, backend: AttentionBackend, attention: nn.Module | None = None
    ) -> None:
        super().__init__(layer, norm_eps, backend, attention)
        self._plan: dict[str, styles.TPStyle] = {"projection": styles.SEQUENCE_PARALLEL}
        self.embedding_norm = norm(layer, "embedding_norm", norm_eps)
        self.hidden_norm = norm(layer, "hidden_norm", norm_eps)
        self.projection = linear(layer, "projection")
        self.norm = norm(layer, "norm", norm_eps)

    def tp_plan(self) -> dict[str, styles.TPStyle]:
        return self._plan

    def forward(self, x: Hidden, rope: Rope | None, mask: Any, embedded: Hidden | None = None) -> Hidden:
        """Compute this depth's hidden states, normalized for the head. `x` are the previous depth's hidden states,
        `embedded` the embeddings of the tokens that many places ahead."""
        assert embedded is not None, "the module reads the next tokens"
        joined = torch.cat((self.embedding_norm(embedded), self.hidden_norm(x)), dim=-1)
        return self.norm(super().forward(self.projection(joined), rope, mask))


def attentions_of(block: nn.Module) -> list[nn.Module]:
    """Attention modules of a block whose `core` is one that context parallelism can replace."""
    return [module for module in block.modules() if isinstance(getattr(module, "core", None), CausalAttention)]


def iter_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over transformer blocks in order; empty for a model without a `blocks` ModuleDict."""
    for _, block in iter_numbered_blocks(model):
        yield block


def iter_numbered_blocks(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Iterate over pairs of layer index in the whole model and block; a pipeline stage yields its own blocks. A block
    that several layers share comes once, as the first of them."""
    blocks, seen = getattr(model, "blocks", None), set[nn.Module]()
    if isinstance(blocks, nn.ModuleDict):
        for index, (key, block) in enumerate(blocks.items()):
            if block not in seen:
                yield int(key) if key.isdecimal() else index, block
            seen.add(block)


class TokenShard(nn.Identity):
    """Identity that sequence parallelism replaces by this rank's part of a stream's tokens."""

    tp_style = styles.ShardTokens()


class ResultGather(nn.Identity):
    """Identity that sequence parallelism replaces by a gather of results of all tokens."""

    tp_style = styles.GatherResult()


class RopeOrder(nn.Module):
    """RoPE caches in the order of the gathered sequence, which without sequence parallelism is one stream, then the
    other."""

    tp_style = styles.GatheredOrder()

    def forward(self, rope: tables.Rope, first_stream: int) -> tables.Rope:
        """Return the caches of all tokens; `first_stream` is this rank's number of tokens in the first stream."""
        return rope
