"""Multi-head latent attention (DeepSeek-AI 2024): config fields, spec and shape rules.

Keys and values of all heads are expanded from one latent per token, and one rotated key is shared by all heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from titan_exp.config.errors.user_error import Violation, listed, multiples_near
from titan_exp.config.groups.types import PositiveInt
from titan_exp.models.spec.model_spec import AttentionSpec, LinearSpec, VectorSpec
from titan_exp.models.spec.rope import YarnRope
from titan_exp.models.spec.tp_plan import SEQUENCE_PARALLEL, Colwise, FusedRows, RowPiece, Rowwise
from titan_exp.models.spec.transformer import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(AttentionSpec):
    """Latent attention of one layer; a head's features are `qk_dim - rope_dim` of its own and `rope_dim` rotated."""

    latent_dim: int
    """Width of the latent of keys and values."""
    rope_dim: int
    """Rotated features of a query or key head, its last."""


@dataclass(frozen=True)
class LatentAttentionConfig(DecoderConfig):
    """Fields of a decoder with latent attention."""

    heads: PositiveInt
    """Heads of queries, keys and values. E.g. `model.heads=16`."""
    q_lora_rank: PositiveInt | None
    """Width of the latent of queries; null computes queries from the hidden state.
    E.g. `model=deepseek_debug model.q_lora_rank=768`."""
    kv_lora_rank: PositiveInt
    """Width of the latent of keys and values. E.g. `model=deepseek_debug model.kv_lora_rank=256`."""
    qk_nope_head_dim: PositiveInt
    """Features of a query or key head without RoPE. E.g. `model=deepseek_debug model.qk_nope_head_dim=64`."""
    qk_rope_head_dim: PositiveInt
    """Features of a query or key head with RoPE; heads share those of keys.
    E.g. `model=deepseek_debug model.qk_rope_head_dim=32`."""
    v_head_dim: PositiveInt
    """Width of a value head. E.g. `model=deepseek_debug model.v_head_dim=64`."""
    rope: YarnRope
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""


def latent_attention(
    config: LatentAttentionConfig, *, out_std: float
) -> tuple[LatentAttentionSpec, tuple[LinearSpec, ...], tuple[VectorSpec, ...]]:
    """Attention, linears and latent norms of a layer.

    `out_std` is the initial standard deviation of the linear that writes to the residual stream.
    """
    dim, std, heads = config.dim, config.init_std, config.heads
    qk_dim, kv_rank, q_rank = config.qk_nope_head_dim + config.qk_rope_head_dim, config.kv_lora_rank, config.q_lora_rank
    attention = LatentAttentionSpec(
        heads,
        heads,
        qk_dim,
        config.v_head_dim,
        qk_dim_key="model.qk_nope_head_dim + model.qk_rope_head_dim",
        scale=qk_dim**-0.5 * config.rope.resolved(config.context).score_factor,
        latent_dim=kv_rank,
        rope_dim=config.qk_rope_head_dim,
    )
    by_head = Colwise(heads, described=f"{heads} heads (model.heads)", key="model.heads")
    query_latent = () if q_rank is None else (LinearSpec("attention.q_a", dim, q_rank, std, SEQUENCE_PARALLEL),)
    queries = FusedRows("attention", (RowPiece("query", qk_dim),))
    latents = FusedRows("attention", (RowPiece("latent", kv_rank), RowPiece("rotated_key", config.qk_rope_head_dim)))
    expanded = FusedRows("attention", (RowPiece("key", config.qk_nope_head_dim), RowPiece("value", config.v_head_dim)))
    latent_width = kv_rank + config.qk_rope_head_dim
    linears = (
        *query_latent,
        LinearSpec("attention.q", q_rank or dim, heads * qk_dim, std, by_head, rows=queries),
        LinearSpec("attention.kv_a", dim, latent_width, std, SEQUENCE_PARALLEL, rows=latents),
        LinearSpec(
            "attention.kv_b",
            kv_rank,
            heads * (config.qk_nope_head_dim + config.v_head_dim),
            std,
            replace(by_head, gathers=False),
            rows=expanded,
        ),
        LinearSpec("attention.out", heads * config.v_head_dim, dim, out_std, Rowwise(), writes_residual=True),
    )
    query_norm = () if q_rank is None else (VectorSpec("attention.q_a_norm", q_rank),)
    return attention, linears, (*query_norm, VectorSpec("attention.kv_a_norm", kv_rank))


def latent_attention_violations(config: LatentAttentionConfig) -> Iterator[Violation]:
    """Head widths that latent attention cannot compute."""
    if config.qk_rope_head_dim % 2:
        yield Violation(
            "model.qk_rope_head_dim",
            config.qk_rope_head_dim,
            "rotary embedding turns pairs, so the rotated part of a head must be even",
            f"nearest: model.qk_rope_head_dim={listed(multiples_near(config.qk_rope_head_dim, 2))}",
        )
    qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if config.v_head_dim > qk_dim:
        yield Violation(
            "model.v_head_dim",
            config.v_head_dim,
            f"attention kernels take values at most as wide as keys, and those are {qk_dim} wide "
            "(model.qk_nope_head_dim + model.qk_rope_head_dim)",
            f"at most model.v_head_dim={qk_dim}",
        )
