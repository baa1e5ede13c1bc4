"""DeepSeek V2 and V3 (DeepSeek-AI 2024), and Kimi K2: latent attention, dense layers first, then experts.

V2 scores experts by a softmax and groups by their best expert; V3 by sigmoids with a bias for the choice, and groups by
their two best.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.types import Count, PositiveInt
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, decoder_map
from titan_exp.models.convert.hf_config import HuggingFace
from titan_exp.models.convert.state_dict_map import StateDictMap
from titan_exp.models.convert.yarn_keys import yarn_keys, yarn_rope
from titan_exp.models.spec.decoder_config import decoder_spec
from titan_exp.models.spec.latent_attention import (
    LatentAttentionConfig,
    latent_attention,
    latent_attention_violations,
)
from titan_exp.models.spec.model_spec import LayerSpec, LinearSpec, ModelSpec, VectorSpec
from titan_exp.models.spec.moe import BalanceConfig, MoEConfig, RouterSpec
from titan_exp.models.spec.moe_layer import moe_linears, moe_violations
from titan_exp.models.spec.swiglu import swiglu_linears, swiglu_violations

if TYPE_CHECKING:
    from titan_exp.models.blocks.transformer import TransformerBlock
    from titan_exp.ops.attention.sdpa import AttentionBackend


@dataclass(frozen=True)
class Config(LatentAttentionConfig):
    """Shape of a DeepSeek."""

    dense_layers: Count
    """First layers, whose feed-forward is dense."""
    ffn_dim: PositiveInt
    """Width of the feed-forward of dense layers; a multiple of 32."""
    moe: MoEConfig
    """Experts of the other layers."""


def spec(config: Config) -> ModelSpec:
    """Dense layers first, then layers with experts."""
    dim, std = config.dim, config.init_std
    attention, linears, norms = latent_attention(config, out_std=std)

    def layer(feed_forward: tuple[LinearSpec, ...], router: RouterSpec | None) -> LayerSpec:
        vectors = (VectorSpec("attention_norm", dim), *norms, VectorSpec("feed_forward_norm", dim))
        return LayerSpec(attention, (*linears, *feed_forward), vectors, router)

    dense = swiglu_linears("feed_forward", dim, config.ffn_dim, std=std, out_std=std, key="model.ffn_dim")
    experts = moe_linears(config.moe, dim, std=std, out_std=std)
    layers = (layer(dense, None),) * config.dense_layers
    layers += (layer(experts, RouterSpec("feed_forward.router", dim, std, config.moe)),) * (config.layers - len(layers))
    rope = config.rope.resolved(config.context)
    return decoder_spec(config, layers, rope=rope, rope_dim=config.qk_rope_head_dim)


def block(config: Config, layer: int, backend: "AttentionBackend") -> "TransformerBlock":
    """Pre-norm block with latent attention, dense or with experts."""
    from titan_exp.models.blocks.latent_attention import LatentAttention
    from titan_exp.models.blocks.transformer import TransformerBlock

    described = spec(config).layers[layer]
    return TransformerBlock(described, config.norm_eps, backend, LatentAttention(described, backend))


def violations(config: Config) -> Iterator[Violation]:
    """Shape violations of a DeepSeek."""
    if config.dense_layers > config.layers:
        yield Violation(
            "model.dense_layers",
            config.dense_layers,
            f"there are {config.layers} layers (model.layers)",
            f"at most model.dense_layers={config.layers}",
        )
    yield from latent_attention_violations(config)
    yield from swiglu_violations(config.ffn_dim, "model.ffn_dim")
    yield from moe_violations(config.moe)


STATE_DICTS = {"huggingface": HUGGINGFACE}
"""Parameter names by checkpoint format."""


def state_dict_map(config: Config, form: str) -> StateDictMap:
    """State-dict map from another tool's tensors to our parameters."""
    return decoder_map(spec(config), STATE_DICTS[form])


V2, V3 = "deepseek_v2", "deepseek_v3"
EQUAL_KEYS = {
    "num_hidden_layers": "layers",
    "hidden_size": "dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context",
    "num_attention_heads": "heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "first_k_dense_replace": "dense_layers",
    "intermediate_size": "ffn_dim",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
}
"""Our fields by keys of `config.json`."""
EQUAL_EXPERT_KEYS = {
    "n_routed_experts": "experts",
    "num_experts_per_tok": "active_experts",
    "moe_intermediate_size": "ffn_dim",
    "n_shared_experts": "shared_experts",
    "routed_scaling_factor": "scale",
}
"""Our fields of `moe` by keys of `config.json`."""


def _is_v3(moe: MoEConfig) -> bool:
    return moe.score == "sigmoid"


def _inexpressible(config: Config) -> Iterator[Violation]:
    moe, version = config.moe, "V3" if _is_v3(config.moe) else "V2"
    wanted = {"router_bias": True, "group_score": "top2_sum"} if _is_v3(moe) else {"router_bias": False}
    if not _is_v3(moe):
        wanted |= {"normalized": False, **({"group_score": "max"} if moe.groups > 1 else {})}
    for key, value in wanted.items():
        if getattr(moe, key) != value:
            reason = (
                f"the router of DeepSeek {version}, with model.moe.score={moe.score}, has none such in transformers"
            )
            yield Violation(f"model.moe.{key}", getattr(moe, key), reason, f"model.moe.{key}={str(value).lower()}")


def _to_config_json(config: Config) -> dict[str, Any]:
    moe, is_v3 = config.moe, _is_v3(config.moe)
    return {
        "model_type": V3 if is_v3 else V2,
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        **{theirs: getattr(config, ours) for theirs, ours in EQUAL_KEYS.items()},
        **{theirs: getattr(moe, ours) for theirs, ours in EQUAL_EXPERT_KEYS.items()},
        **yarn_keys(config.rope.resolved(config.context)),
        "num_key_value_heads": config.heads,
        "tie_word_embeddings": config.tied_embeddings,
        "n_group": moe.groups,
        "topk_group": moe.active_groups,
        "norm_topk_prob": moe.normalized,
        "scoring_func": moe.score,
        "topk_method": "noaux_tc" if is_v3 else "greedy" if moe.groups == 1 else "group_limited_greedy",
        # Further layers for multi-token prediction.
        "num_nextn_predict_layers": 0,
        **FIXED,
    }


def _from_config_json(values: Mapping[str, Any], name: str) -> Config:
    is_v3 = values["model_type"] != V2
    score, method = "sigmoid" if is_v3 else "softmax", values.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    if values.get("scoring_func", score) != score or (method == "noaux_tc") != is_v3:
        router = f"scoring_func={values.get('scoring_func')!r} and topk_method={method!r}"
        raise UserError(f"config.json: {router} is not the router of a {values['model_type']}.")
    grouped = method != "greedy"
    moe = MoEConfig(
        **{ours: values[theirs] for theirs, ours in EQUAL_EXPERT_KEYS.items()},
        score=score,
        fp32_router=True,
        router_bias=is_v3,
        # transformers reads it for V3 only.
        normalized=is_v3 and values.get("norm_topk_prob", True),
        groups=int(values["n_group"]) if grouped else 1,
        active_groups=int(values["topk_group"]) if grouped else 1,
        group_score="top2_sum" if is_v3 else "max",
        balance=BalanceConfig("none", 0.0, 0.0, 0.0, centered_bias=True),
    )
    fields = {ours: values[theirs] for theirs, ours in EQUAL_KEYS.items()}
    fields["rope"] = yarn_rope(values, fields["context"])
    fields["tied_embeddings"] = values.get("tie_word_embeddings", False)
    return Config(name=name, architecture="deepseek", moe=moe, attention_backend="auto", **fields)


FIXED = {"attention_bias": False, "hidden_act": "silu", "moe_layer_freq": 1, "rope_interleave": True}
"""Keys of `config.json` that every DeepSeek has."""

huggingface = HuggingFace(
    model_type=V3,
    architectures=("DeepseekV3ForCausalLM",),
    fixed=FIXED,
    to_config=_to_config_json,
    from_config=_from_config_json,
    violations=_inexpressible,
    # Layers after the last predict further tokens.
    unread=lambda values: [f"model.layers.{values['num_hidden_layers']}."],
    other_types=(V2, "kimi_k2"),
)
"""`config.json` of Hugging Face's DeepSeek V2 and V3; Kimi K2's has the keys of V3."""
