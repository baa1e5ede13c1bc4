"""Grouped-query attention with a SwiGLU feed-forward: config fields, spec and shape rules that families share."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from titan_exp.config.errors.did_you_mean import divisors, listed, multiples_near, nearest_numbers
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.types import PositiveFloat, PositiveInt
from titan_exp.models.spec.model_spec import AttentionSpec, LayerSpec, LinearSpec, ModelSpec, VectorSpec
from titan_exp.models.spec.rope import PlainRope
from titan_exp.models.spec.tp_plan import Colwise, HeadParallel, ReplicatedGateUp, ReplicatedKV, Rowwise

FFN_GROUP = 32
"""Gate and up rows alternate in groups of this many in the fused weight; `ops.swiglu` computes on them."""


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """Fields of a decoder with grouped-query attention and SwiGLU."""

    heads: PositiveInt
    """Query heads."""
    kv_heads: PositiveInt
    """Key and value heads; fewer than `heads` is grouped-query attention."""
    head_dim: PositiveInt
    """Width of one head."""
    ffn_dim: PositiveInt
    """Width of the feed-forward layer; a multiple of 32."""
    norm_eps: PositiveFloat
    """Added to the mean square in RMSNorm."""
    tied_embeddings: bool
    """The output head uses the embedding's weight."""
    rope: PlainRope
    """Rotary position embedding."""
    init_std: PositiveFloat
    """Standard deviation of initial weights. Llama scales residual outputs down by sqrt(2 · layers)."""
    attention_backend: Literal["auto", "cudnn", "flash", "fa3", "fa4", "efficient", "math", "flex"]
    """Kernel behind attention. `auto` takes the fastest that torch brings along for this device; `fa3` and `fa4` are
    FlashAttention 3 and 4, from packages of their own; `flex` is FlexAttention. The log says which one runs."""


def transformer_layer(config: TransformerConfig, *, out_std: float, qk_norm: bool = False) -> LayerSpec:
    """Spec of a pre-norm block: fused qkv, attention output, fused gate and up, down.

    `out_std` is the initial standard deviation of the two linears that write to the residual stream.
    """
    dim, std, width = config.dim, config.init_std, config.head_dim
    attention = AttentionSpec(config.heads, config.kv_heads, qk_dim=width, v_dim=width)
    heads = f"{config.heads} query heads with {config.kv_heads} key and value heads"
    channels = f"{config.ffn_dim} feed-forward channels (model.ffn_dim)"
    qkv = Colwise(config.kv_heads, ReplicatedKV(attention.group, width, count="group"), heads)
    split = ReplicatedGateUp(FFN_GROUP, count="group")
    gate_up = Colwise(config.ffn_dim // FFN_GROUP, split, channels, key="model.ffn_dim", width=FFN_GROUP)
    head_norms = (
        VectorSpec("attention.q_norm", width, HeadParallel()),
        VectorSpec("attention.k_norm", width, HeadParallel()),
    )
    return LayerSpec(
        attention,
        linears=(
            LinearSpec("attention.qkv", dim, (config.heads + 2 * config.kv_heads) * width, std, qkv),
            LinearSpec("attention.out", config.heads * width, dim, out_std, Rowwise()),
            LinearSpec("feed_forward.gate_up", dim, 2 * config.ffn_dim, std, gate_up),
            LinearSpec("feed_forward.down", config.ffn_dim, dim, out_std, Rowwise()),
        ),
        vectors=(
            VectorSpec("attention_norm", dim),
            *(head_norms if qk_norm else ()),
            VectorSpec("feed_forward_norm", dim),
        ),
    )


def transformer_spec(config: TransformerConfig, layers: tuple[LayerSpec, ...]) -> ModelSpec:
    """Spec of a decoder with these layers."""
    return ModelSpec(
        layers,
        dim=config.dim,
        vocab_size=config.vocab_size,
        tied=config.tied_embeddings,
        norm_eps=config.norm_eps,
        embedding_std=config.init_std,
        rope=config.rope,
        rope_dim=config.head_dim,
        attention_backend=config.attention_backend,
    )


def shape_violations(config: TransformerConfig) -> Iterator[Violation]:
    """Head counts, head width and feed-forward width that the shared block cannot compute."""
    if config.heads % config.kv_heads:
        yield Violation(
            "model.kv_heads",
            config.kv_heads,
            f"{config.heads} query heads cannot share {config.kv_heads} key and value heads evenly",
            f"nearest: model.kv_heads={listed(nearest_numbers(config.kv_heads, divisors(config.heads)))}",
        )
    if config.head_dim % 2:
        yield Violation(
            "model.head_dim",
            config.head_dim,
            "rotary embedding turns pairs, so a head's width must be even",
            f"nearest: model.head_dim={listed(multiples_near(config.head_dim, 2))}",
        )
    if config.ffn_dim % FFN_GROUP:
        yield Violation(
            "model.ffn_dim",
            config.ffn_dim,
            f"it is not a multiple of {FFN_GROUP}, the groups in which gate and up rows alternate",
            f"nearest: model.ffn_dim={listed(multiples_near(config.ffn_dim, FFN_GROUP))}",
        )
