"""DeepSeek V2 and V3 (DeepSeek-AI 2024), and Kimi K2: latent attention, dense layers first, then experts.

V2 scores experts by a softmax, and groups by their best expert. V3 uses sigmoids with a bias for the choice, and scores
groups by their two best experts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.config.groups.types import BlockCount, PositiveInt
from titan_exp.models import family
from titan_exp.models.convert.hf_config import MTP_KEY
from titan_exp.models.convert.hf_keys import UNBALANCED, Key, flag, huggingface_class, rope_keys, whole
from titan_exp.models.spec import transformer
from titan_exp.models.spec.feed_forward import moe_linears, swiglu_linears
from titan_exp.models.spec.model_spec import LayerSpec, LinearSpec, ModelSpec, VectorSpec
from titan_exp.models.spec.moe import MoEConfig, RouterSpec
from titan_exp.models.spec.rope import YarnRope


@dataclass(frozen=True)
class LatentMoEConfig(transformer.LatentAttentionConfig):
    """Fields of a decoder with latent attention, dense layers first, then layers with experts."""

    dense_layers: BlockCount
    """Number of first layers whose feed-forward is dense. E.g. `model=deepseek_debug model.dense_layers=3`."""
    ffn_dim: PositiveInt
    """Width of the feed-forward of dense layers, a multiple of 32. E.g. `model.ffn_dim=3072`."""
    moe: MoEConfig
    """Experts in place of the feed-forward layer. E.g. `model=qwen3_moe_debug model.moe.experts=16`."""


@dataclass(frozen=True)
class Config(LatentMoEConfig):
    """Shape of a DeepSeek."""

    rope: YarnRope
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""
    mtp: transformer.MTPConfig = field(default_factory=transformer.MTPConfig)
    """Multi-token prediction: modules behind the last block predict further tokens in training. Inference does not use
    them. E.g. `model=deepseek_debug model.mtp.depth=1`."""


def spec(config: Config) -> ModelSpec:
    """Spec: dense layers first, then layers with experts. Modules of multi-token prediction have experts, too."""
    dense, mixed = layer_kinds(config)
    return transformer.decoder_spec(
        config,
        (dense,) * config.dense_layers + (mixed,) * (config.layers - config.dense_layers),
        rope=config.rope.resolved(config.context),
        rope_dim=config.qk_rope_head_dim,
        mtp_layers=transformer.mtp_layers(config.mtp, mixed, config.dim, config.init_std),
        mtp_weight=config.mtp.weight,
    )


def layer_kinds(config: LatentMoEConfig) -> tuple[LayerSpec, LayerSpec]:
    """Specs of a dense layer and of a layer with experts."""
    dim, std = config.dim, config.init_std
    attention, linears, norms = transformer.latent_attention(config, out_std=std)

    def layer(feed_forward: tuple[LinearSpec, ...], router: RouterSpec | None) -> LayerSpec:
        vectors = (VectorSpec("attention_norm", dim), *norms, VectorSpec("feed_forward_norm", dim))
        return LayerSpec(attention, (*linears, *feed_forward), vectors, router)

    dense = swiglu_linears("feed_forward", dim, config.ffn_dim, std=std, out_std=std, key="model.ffn_dim")
    experts = moe_linears(config.moe, dim, std=std, out_std=std)
    return layer(dense, None), layer(experts, RouterSpec("feed_forward.router", dim, std, config.moe))


def violations(config: LatentMoEConfig) -> Iterator[Violation]:
    """Violations by shapes that DeepSeek models cannot have."""
    if config.dense_layers > config.layers:
        reason = f"the model has only model.layers={config.layers} layers"
        remedy = f"use model.dense_layers={config.layers} or less"
        yield Violation("model.dense_layers", config.dense_layers, reason, remedy)
    yield from family.violations(config)


block, state_dict_map = family.block, family.decoder_maps()


V2, V3 = "deepseek_v2", "deepseek_v3"  # values of `model_type`; Kimi K2's file uses V3's keys


def _version(config: Config) -> str:
    return V3 if config.moe.score == "sigmoid" else V2


def _method(values: Mapping[str, Any]) -> str:
    """Group selection method of the router."""
    return values.get("topk_method") or ("greedy" if values["model_type"] == V2 else "noaux_tc")


def _score(values: Mapping[str, Any], _: object) -> str:
    """Score function of the router. Refuses a score of neither version."""
    is_v3, method = values["model_type"] != V2, _method(values)
    score = "sigmoid" if is_v3 else "softmax"
    if values.get("scoring_func", score) != score or (method == "noaux_tc") != is_v3:
        router = f"scoring_func={values.get('scoring_func')!r} and topk_method={method!r}"
        raise UserError(f"config.json: {values['model_type']} models do not have a router with {router}.")
    return score


def _groups(key: str, values: Mapping[str, Any], _: object) -> int:
    return 1 if _method(values) == "greedy" else whole(values[key])


_KEYS: dict[str, Any] = {
    "model_type": Key(
        "moe.group_score", read=lambda values, _: "max" if values["model_type"] == V2 else "top2_sum", write=_version
    ),
    "architectures": Key(write=lambda config: [f"DeepseekV{_version(config)[-1]}ForCausalLM"]),
    "num_hidden_layers": Key("layers"),
    "hidden_size": Key("dim"),
    "vocab_size": Key("vocab_size"),
    "max_position_embeddings": None,  # holds its place in the order; a key of RoPE
    "num_attention_heads": Key("heads"),
    "q_lora_rank": Key("q_lora_rank", lambda rank: None if rank is None else whole(rank)),
    "kv_lora_rank": Key("kv_lora_rank"),
    "qk_nope_head_dim": Key("qk_nope_head_dim"),
    "qk_rope_head_dim": Key("qk_rope_head_dim"),
    "v_head_dim": Key("v_head_dim"),
    "first_k_dense_replace": Key("dense_layers"),
    "intermediate_size": Key("ffn_dim"),
    "rms_norm_eps": Key("norm_eps", float),
    "initializer_range": Key("init_std", float),
    "n_routed_experts": Key("moe.experts"),
    "num_experts_per_tok": Key("moe.active_experts"),
    "moe_intermediate_size": Key("moe.ffn_dim"),
    "n_shared_experts": Key("moe.shared_experts"),
    "routed_scaling_factor": Key("moe.scale", float),
    **rope_keys(YarnRope),
    "num_key_value_heads": Key(write=lambda config: config.heads),
    "tie_word_embeddings": Key("tied_embeddings", flag, False),
    "n_group": Key("moe.groups", read=partial(_groups, "n_group")),
    "topk_group": Key("moe.active_groups", read=partial(_groups, "topk_group")),
    # transformers reads this key for V3 only.
    "norm_topk_prob": Key(
        "moe.normalized", read=lambda values, _: values["model_type"] != V2 and values.get("norm_topk_prob", True)
    ),
    "scoring_func": Key("moe.score", read=_score),
    "topk_method": Key(
        "moe.router_bias",
        read=lambda values, _: _method(values) == "noaux_tc",
        write=lambda config: (
            "noaux_tc" if _version(config) == V3 else "greedy" if config.moe.groups == 1 else "group_limited_greedy"
        ),
    ),
    MTP_KEY: Key("mtp.depth", default=lambda _: 0),
    "attention_bias": False,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "rope_interleave": True,
}


def _inexpressible(config: Config) -> Iterator[Violation]:
    """Violations by routers of neither version."""
    moe, is_v3 = config.moe, _version(config) == V3
    wanted = {"router_bias": True, "group_score": "top2_sum"} if is_v3 else {"router_bias": False, "normalized": False}
    if not is_v3 and moe.groups > 1:
        wanted |= {"group_score": "max"}
    for key, value in wanted.items():
        if getattr(moe, key) != value:
            router = (
                f"with model.moe.score={moe.score}, transformers has the router of DeepSeek V{_version(config)[-1]}"
            )
            reason, remedy = f"{router}, and it cannot express this", f"use model.moe.{key}={shown(value)}"
            yield Violation(f"model.moe.{key}", getattr(moe, key), reason, remedy)


def _unread_layers(values: Mapping[str, Any]) -> list[str]:
    """Prefixes of the tensors of multi-token prediction, which can be left out."""
    last = int(values["num_hidden_layers"])
    return [f"model.layers.{last + module}." for module in range(max(1, values.get(MTP_KEY) or 0))]


huggingface = huggingface_class(
    V3,
    "DeepseekV3ForCausalLM",
    Config,
    _KEYS,
    {"moe.fp32_router": True, "moe.balance": UNBALANCED},
    violations=_inexpressible,
    unread=_unread_layers,
    other_types=(V2, "kimi_k2"),
)
