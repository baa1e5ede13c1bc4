"""`config.json` of Hugging Face's DeepSeek V2 and V3; Kimi K2's has the keys of V3."""

from collections.abc import Iterator, Mapping
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.models.convert.rope_keys import read_rope, rope_keys
from titan_exp.models.spec.moe import BalanceConfig, MoEConfig
from titan_exp.models.spec.mtp import MTPConfig
from titan_exp.models.spec.rope import YarnRope

V2, V3 = "deepseek_v2", "deepseek_v3"
"""Values of `model_type`."""
FIXED = {"attention_bias": False, "hidden_act": "silu", "moe_layer_freq": 1, "rope_interleave": True}
"""Keys of `config.json` that every DeepSeek has."""
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


def inexpressible(config: Any) -> Iterator[Violation]:
    """Routers of neither version."""
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


def config_json(config: Any) -> dict[str, Any]:
    """Keys of `config.json` from the family's config."""
    moe, is_v3 = config.moe, _is_v3(config.moe)
    return {
        "model_type": V3 if is_v3 else V2,
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        **{theirs: getattr(config, ours) for theirs, ours in EQUAL_KEYS.items()},
        **{theirs: getattr(moe, ours) for theirs, ours in EQUAL_EXPERT_KEYS.items()},
        **rope_keys(config.rope, config.context),
        "num_key_value_heads": config.heads,
        "tie_word_embeddings": config.tied_embeddings,
        "n_group": moe.groups,
        "topk_group": moe.active_groups,
        "norm_topk_prob": moe.normalized,
        "scoring_func": moe.score,
        "topk_method": "noaux_tc" if is_v3 else "greedy" if moe.groups == 1 else "group_limited_greedy",
        "num_nextn_predict_layers": config.mtp.depth,
        **FIXED,
    }


def config_fields(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Fields of the family's config from `config.json` and a name.

    Raises:
        UserError: the router is of neither version.
    """
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
    fields["rope"] = read_rope(values, fields["context"], YarnRope)
    fields["tied_embeddings"] = values.get("tie_word_embeddings", False)
    fields["mtp"] = MTPConfig(depth=int(values.get("num_nextn_predict_layers") or 0))
    return {"name": name, "architecture": "deepseek", "moe": moe, "attention_backend": "auto", **fields}


def unread_layers(values: Mapping[str, Any]) -> list[str]:
    """Prefixes of the tensors of multi-token prediction, which a model may do without."""
    last = int(values["num_hidden_layers"])
    return [f"model.layers.{last + module}." for module in range(max(1, values.get("num_nextn_predict_layers") or 0))]
