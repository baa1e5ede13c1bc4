"""Decoders with grouped-query attention and SwiGLU: config fields, spec and shape rules that families share.

Module k of multi-token prediction (DeepSeek-AI 2024, V3) comes after the last layer. It joins the hidden state of token
i with the embedding of token i + k, and predicts token i + k + 1 by a block of its own and the model's LM head. Only
training uses it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from titan_exp.config.errors.user_error import Violation, divisors, listed, multiples_near, nearest_numbers
from titan_exp.config.groups.experiment import NO_CHANGE, ModelConfig
from titan_exp.config.groups.types import BlockCount, NonNegativeFloat, PositiveFloat, PositiveInt
from titan_exp.models.spec import tp_plan as styles
from titan_exp.models.spec.feed_forward import moe_linears, shared_gate, swiglu_linears, swiglu_violations
from titan_exp.models.spec.mixers import AttentionSpec, QueryTemperature
from titan_exp.models.spec.model_spec import LayerSpec, LinearSpec, ModelSpec, VectorSpec
from titan_exp.models.spec.moe import PLAIN_EXPERTS, MoEConfig, MoEVariant, RouterSpec
from titan_exp.models.spec.rope import PlainRope

WIDTHS = ("dim", "heads", "kv_heads", "ffn_dim", "moe.ffn_dim")
"""Keys of the group `model` that grow with the width of a transformer."""


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """Fields of a decoder."""

    vocab_size: PositiveInt
    """Vocabulary size: number of rows of the embedding, at least as many as the tokenizer has tokens.
    E.g. `model.vocab_size=50304`."""
    norm_eps: PositiveFloat
    """Epsilon of RMSNorm, which is added to the mean square. E.g. `model.norm_eps=1e-6`."""
    tied_embeddings: bool
    """True if the output head uses the embedding's weight. E.g. `model.tied_embeddings=true`."""
    rope: PlainRope
    """Rotary position embedding."""
    init_std: PositiveFloat = field(metadata=NO_CHANGE)
    """Standard deviation of initial weights. Llama divides that of residual outputs by sqrt(2 · layers).
    E.g. `model.init_std=0.01`."""
    attention_backend: Literal["auto", "cudnn", "flash", "fa3", "fa4", "efficient", "math", "flex"] = field(
        metadata=NO_CHANGE
    )
    """Attention kernel. `auto` takes the fastest that torch brings along for this device. `fa3` and `fa4` are
    FlashAttention 3 and 4, from packages of their own, and `flex` is FlexAttention.

    The log says which one runs. E.g. `model.attention_backend=cudnn`."""

    def effective(self) -> "DecoderConfig":
        return replace(self, rope=self.rope.effective(self.context))


def decoder_spec(
    config: DecoderConfig,
    layers: tuple[LayerSpec, ...],
    *,
    rope: PlainRope,
    rope_dim: int,
    mtp_layers: tuple[LayerSpec, ...] = (),
    mtp_weight: float = 0.0,
    zero_centered_norm: bool = False,
) -> ModelSpec:
    """Spec of a decoder with these layers, which rotates `rope_dim` features of a head."""
    return ModelSpec(
        layers,
        dim=config.dim,
        vocab_size=config.vocab_size,
        tied=config.tied_embeddings,
        norm_eps=config.norm_eps,
        embedding_std=config.init_std,
        rope=rope if rope.rotates else None,
        rope_dim=rope_dim,
        attention_backend=config.attention_backend,
        mtp_layers=mtp_layers,
        mtp_weight=mtp_weight,
        zero_centered_norm=zero_centered_norm,
    )


@dataclass(frozen=True)
class AttentionConfig(DecoderConfig):
    """Fields of a decoder with grouped-query attention."""

    heads: PositiveInt
    """Number of query heads. E.g. `model.heads=8`."""
    kv_heads: PositiveInt
    """Number of key and value heads; fewer than `heads` is grouped-query attention. E.g. `model.kv_heads=2`."""
    head_dim: PositiveInt
    """Width of a head. E.g. `model.head_dim=64`."""


@dataclass(frozen=True)
class TransformerConfig(AttentionConfig):
    """Fields of a decoder with grouped-query attention and SwiGLU."""

    ffn_dim: PositiveInt
    """Width of the feed-forward layer, a multiple of 32. E.g. `model.ffn_dim=1536`."""


@dataclass(frozen=True, kw_only=True)
class AttentionVariant:
    """Variant of a layer's attention, beyond grouped-query attention with RoPE."""

    window: int | None = None
    """Sliding window in keys, the token itself included."""
    chunk: int | None = None
    """Chunk length in positions."""
    sinks_std: float | None = None
    """Standard deviation of initial sinks; None is attention without sinks."""
    bias_std: float | None = None
    """Standard deviation of the initial biases of qkv and of the output, 0 for zeros; None means no biases."""
    rope: bool = True
    """False if queries and keys are not rotated."""
    qk_norm: Literal["head", "all_heads"] | None = None
    """Extent of the norms with weights over queries and keys before RoPE: each head by itself, sharing one weight, or
    all heads at once. None is none."""
    rotated_norm_eps: float | None = None
    """Epsilon of a norm without weight over query and key heads, after RoPE."""
    temperature: QueryTemperature | None = None
    """Scaling of queries by position."""
    rotary_dim: int | None = None
    """Number of first features of a head that RoPE rotates; None is all of them."""
    gated: bool = False
    """True if each query head has a gate, whose sigmoid multiplies the head's output."""
    zero_centered: bool = False
    """True if the block's norms, QK norm included, multiply by one plus their weight."""


PLAIN = AttentionVariant()
"""Full causal attention with RoPE."""
NORMED = AttentionVariant(qk_norm="head")
"""Full causal attention with RoPE and QK norm per head."""


def transformer_layer(config: TransformerConfig, *, out_std: float, attention: AttentionVariant = PLAIN) -> LayerSpec:
    """Spec of a pre-norm block: fused qkv, attention output, fused gate and up, down. `out_std` is the initial standard
    deviation of the two linears that write to the residual stream."""
    key, std = "model.ffn_dim", config.init_std
    linears = swiglu_linears("feed_forward", config.dim, config.ffn_dim, std=std, out_std=out_std, key=key)
    return _layer(config, linears, None, out_std=out_std, variant=attention)


def moe_transformer_layer(
    config: AttentionConfig,
    moe: MoEConfig,
    *,
    out_std: float,
    attention: AttentionVariant = PLAIN,
    experts: MoEVariant = PLAIN_EXPERTS,
) -> LayerSpec:
    """Spec of a pre-norm block with experts in place of the feed-forward; `out_std` as in `transformer_layer`."""
    linears = moe_linears(moe, config.dim, std=config.init_std, out_std=out_std, bias_std=experts.bias_std)
    if experts.gated_shared and moe.shared_experts:
        linears = (*linears, shared_gate(config.dim, config.init_std))
    router = RouterSpec(
        "feed_forward.router", config.dim, config.init_std, moe, experts.logit_bias_std, experts.weighted_inputs
    )
    layer = _layer(config, linears, router, out_std=out_std, variant=attention)
    return replace(layer, swiglu=experts.swiglu)


def _layer(
    config: AttentionConfig,
    feed_forward: tuple[LinearSpec, ...],
    router: RouterSpec | None,
    *,
    out_std: float,
    variant: AttentionVariant,
) -> LayerSpec:
    dim, width = config.dim, config.head_dim
    attention = AttentionSpec(
        config.heads,
        config.kv_heads,
        qk_dim=width,
        v_dim=width,
        sinks=variant.sinks_std is not None,
        window=variant.window,
        chunk=variant.chunk,
        rope=variant.rope,
        rotated_norm_eps=variant.rotated_norm_eps,
        temperature=variant.temperature,
        rotary_dim=variant.rotary_dim,
        gated=variant.gated,
    )
    heads = f"{config.heads} query heads with {config.kv_heads} key and value heads"
    of_query = 2 * width if variant.gated else width
    qkv = styles.Colwise(config.kv_heads, styles.ReplicatedKV(attention.group, of_query, count="group"), heads)
    queries = styles.RowPiece("query_and_gate" if variant.gated else "query", of_query, attention.group)
    rows = styles.FusedRows("attention", (queries, styles.RowPiece("key", width), styles.RowPiece("value", width)))
    sinks = VectorSpec("attention.sinks", config.heads, styles.HeadSharded(), variant.sinks_std)
    qk_norms = []
    for name, count in (("attention.q_norm", config.heads), ("attention.k_norm", config.kv_heads)):
        if variant.qk_norm == "head":
            qk_norms.append(VectorSpec(name, width, styles.HeadParallel(), zero_centered=variant.zero_centered))
        elif variant.qk_norm == "all_heads":
            qk_norms.append(VectorSpec(name, count * width, styles.AcrossHeads(count)))
    outputs, bias = config.heads * of_query + 2 * config.kv_heads * width, variant.bias_std is not None
    biases: dict[str, Any] = {"bias": bias, "bias_std": variant.bias_std or 0.0}
    return LayerSpec(
        attention,
        linears=(
            LinearSpec("attention.qkv", dim, outputs, config.init_std, qkv, rows=rows, **biases),
            LinearSpec(
                "attention.out", config.heads * width, dim, out_std, styles.Rowwise(), **biases, writes_residual=True
            ),
            *feed_forward,
        ),
        vectors=(
            VectorSpec("attention_norm", dim, zero_centered=variant.zero_centered),
            *qk_norms,
            *(() if variant.sinks_std is None else (sinks,)),
            VectorSpec("feed_forward_norm", dim, zero_centered=variant.zero_centered),
        ),
        router=router,
    )


def post_normed(layer: LayerSpec) -> LayerSpec:
    """Return the block with both norms over the outputs of attention and feed-forward, instead of over their inputs."""
    norms = ("attention_norm", "feed_forward_norm")
    vectors = (replace(vector, writes_residual=vector.name in norms) for vector in layer.vectors)
    linears = (replace(linear, writes_residual=False) for linear in layer.linears)
    return replace(layer, linears=tuple(linears), vectors=tuple(vectors))


def transformer_spec(config: AttentionConfig, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    """Spec of a decoder with these layers."""
    return decoder_spec(config, layers, rope=config.rope.resolved(config.context), rope_dim=config.head_dim)


def attention_violations(config: AttentionConfig) -> Iterator[Violation]:
    """Violations by head counts and head widths that the shared block cannot compute."""
    if config.heads % config.kv_heads:
        reason = f"{config.heads} query heads cannot share {config.kv_heads} key and value heads evenly"
        remedy = f"nearest: model.kv_heads={listed(nearest_numbers(config.kv_heads, divisors(config.heads)))}"
        yield Violation("model.kv_heads", config.kv_heads, reason, remedy)
    if config.head_dim % 2:
        reason = "rotary embedding rotates pairs of features, so a head's width must be even"
        remedy = f"nearest: model.head_dim={listed(multiples_near(config.head_dim, 2))}"
        yield Violation("model.head_dim", config.head_dim, reason, remedy)


def rotary_violations(rotated: int, head_dim: int) -> Iterator[Violation]:
    """Violations by a number of rotated features that a head cannot have."""
    if rotated % 2 or rotated > head_dim:
        reason = f"rotary embedding rotates pairs of features, and a head has {head_dim} of them (model.head_dim)"
        near = [size for size in multiples_near(rotated, 2) if size <= head_dim] or [head_dim - head_dim % 2]
        yield Violation("model.rotary_dim", rotated, reason, f"nearest: model.rotary_dim={listed(near)}")


def shape_violations(config: TransformerConfig) -> Iterator[Violation]:
    """Violations by head counts, head widths and feed-forward widths that the shared block cannot compute."""
    yield from attention_violations(config)
    yield from swiglu_violations(config.ffn_dim, "model.ffn_dim")


MTP_DEPTH = "model.mtp.depth"
"""Key of multi-token prediction in the configuration."""


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction."""

    depth: BlockCount = 0
    """Number of modules, each of which predicts one token further ahead. 0 is none, and DeepSeek V3 has 1.
    E.g. `model=deepseek_debug model.mtp.depth=1`."""
    weight: NonNegativeFloat = field(default=0.3, metadata=NO_CHANGE)
    """Factor of the modules' mean loss in the objective. V3 trains with 0.3, and with 0.1 for its last third.
    E.g. `model=deepseek_debug model.mtp.weight=0.1`."""


def mtp_layers(config: MTPConfig, layer: LayerSpec, dim: int, std: float) -> tuple[LayerSpec, ...]:
    """Specs of the modules of multi-token prediction. Their block is `layer`; each has its own norms and projection,
    and shares embedding and head with the model."""
    projection = LinearSpec("projection", 2 * dim, dim, std, styles.SEQUENCE_PARALLEL)
    before = (VectorSpec("embedding_norm", dim), VectorSpec("hidden_norm", dim))
    module = replace(
        layer, linears=(projection, *layer.linears), vectors=(*before, *layer.vectors, VectorSpec("norm", dim))
    )
    return (module,) * config.depth


def mtp_violations(config: MTPConfig, *, tied: bool) -> Iterator[Violation]:
    """Violations by a model whose embedding and head the modules cannot share."""
    if config.depth and tied:
        reason = (
            "its modules look up tokens beside the head, so embedding and head need a weight each, and with "
            "model.tied_embeddings=true they share one"
        )
        yield Violation(MTP_DEPTH, config.depth, reason, f"use model.tied_embeddings=false, or {MTP_DEPTH}=0")


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(AttentionSpec):
    """Latent attention of one layer; each head has `qk_dim - rope_dim` unrotated and `rope_dim` rotated features."""

    latent_dim: int
    """Width of the latent of keys and values."""
    rope_dim: int
    """Number of rotated features of a query or key head, which are its last."""


@dataclass(frozen=True)
class LatentAttentionConfig(DecoderConfig):
    """Fields of a decoder with latent attention."""

    heads: PositiveInt
    """Number of heads of queries, keys and values. E.g. `model.heads=16`."""
    q_lora_rank: PositiveInt | None
    """Width of the queries' latent; null computes queries from the hidden state.
    E.g. `model=deepseek_debug model.q_lora_rank=768`."""
    kv_lora_rank: PositiveInt
    """Width of the latent of keys and values. E.g. `model=deepseek_debug model.kv_lora_rank=256`."""
    qk_nope_head_dim: PositiveInt
    """Number of features of a query or key head without RoPE. E.g. `model=deepseek_debug model.qk_nope_head_dim=64`."""
    qk_rope_head_dim: PositiveInt
    """Number of features of a query or key head with RoPE. All heads share those of the key.
    E.g. `model=deepseek_debug model.qk_rope_head_dim=32`."""
    v_head_dim: PositiveInt
    """Width of a value head. E.g. `model=deepseek_debug model.v_head_dim=64`."""


def latent_attention(
    config: LatentAttentionConfig, *, out_std: float
) -> tuple[LatentAttentionSpec, tuple[LinearSpec, ...], tuple[VectorSpec, ...]]:
    """Attention spec, linears and latent norms of a layer. `out_std` is the initial standard deviation of the linear
    that writes to the residual stream."""
    dim, std, heads = config.dim, config.init_std, config.heads
    qk_dim, kv_rank, q_rank = config.qk_nope_head_dim + config.qk_rope_head_dim, config.kv_lora_rank, config.q_lora_rank
    attention = LatentAttentionSpec(
        heads,
        heads,
        qk_dim,
        config.v_head_dim,
        qk_dim_key="model.qk_nope_head_dim + model.qk_rope_head_dim",
        scale=qk_dim**-0.5 * config.rope.resolved(config.context).score_factor,
        rope=config.rope.rotates,
        latent_dim=kv_rank,
        rope_dim=config.qk_rope_head_dim,
    )
    by_head = styles.Colwise(heads, described=f"{heads} heads (model.heads)", key="model.heads")
    query_latent = () if q_rank is None else (LinearSpec("attention.q_a", dim, q_rank, std, styles.SEQUENCE_PARALLEL),)
    queries = styles.FusedRows("attention", (styles.RowPiece("query", qk_dim),))
    latents = styles.FusedRows(
        "attention", (styles.RowPiece("latent", kv_rank), styles.RowPiece("rotated_key", config.qk_rope_head_dim))
    )
    expanded = styles.FusedRows(
        "attention", (styles.RowPiece("key", config.qk_nope_head_dim), styles.RowPiece("value", config.v_head_dim))
    )
    latent_width = kv_rank + config.qk_rope_head_dim
    linears = (
        *query_latent,
        LinearSpec("attention.q", q_rank or dim, heads * qk_dim, std, by_head, rows=queries),
        LinearSpec("attention.kv_a", dim, latent_width, std, styles.SEQUENCE_PARALLEL, rows=latents),
        LinearSpec(
            "attention.kv_b",
            kv_rank,
            heads * (config.qk_nope_head_dim + config.v_head_dim),
            std,
            replace(by_head, gathers=False),
            rows=expanded,
        ),
        LinearSpec("attention.out", heads * config.v_head_dim, dim, out_std, styles.Rowwise(), writes_residual=True),
    )
    query_norm = () if q_rank is None else (VectorSpec("attention.q_a_norm", q_rank),)
    return attention, linears, (*query_norm, VectorSpec("attention.kv_a_norm", kv_rank))


def latent_attention_violations(config: LatentAttentionConfig) -> Iterator[Violation]:
    """Violations by head widths that latent attention cannot compute."""
    if config.qk_rope_head_dim % 2:
        reason = "rotary embedding rotates pairs of features, so the rotated part of a head must have an even width"
        remedy = f"nearest: model.qk_rope_head_dim={listed(multiples_near(config.qk_rope_head_dim, 2))}"
        yield Violation("model.qk_rope_head_dim", config.qk_rope_head_dim, reason, remedy)
    qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.v_head_dim > qk_dim:
        reason = (
            "attention kernels do not take values wider than keys, and a key is "
            f"model.qk_nope_head_dim + model.qk_rope_head_dim = {qk_dim} wide"
        )
        yield Violation("model.v_head_dim", config.v_head_dim, reason, f"use model.v_head_dim={qk_dim} or less")
