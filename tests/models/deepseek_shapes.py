"""Tiny DeepSeeks with every feature of their version, ours and those of `transformers`."""

from typing import Any

from titan_exp.models.convert.hf_keys import read_rope
from titan_exp.models.deepseek import Config
from titan_exp.models.spec.moe import BalanceConfig, MoEConfig
from titan_exp.models.spec.rope import YarnRope

BALANCE = BalanceConfig("none", 0.0, 0.0, 0.0, centered_bias=True)

MOE: dict[str, Any] = {
    "ffn_dim": 32,
    "fp32_router": True,
    "balance": BALANCE,
    "scale": 1.0,
    "groups": 1,
    "active_groups": 1,
    "group_score": "max",
}
V2_MOE = {**MOE, "score": "softmax", "router_bias": False, "normalized": False, "shared_experts": 2}
LITE_MOE = MoEConfig(**{**V2_MOE, "experts": 8, "active_experts": 3})
LIMITED_MOE = MoEConfig(**{**V2_MOE, "experts": 8, "active_experts": 3, "groups": 4, "active_groups": 2, "scale": 16.0})
V3_MOE = MoEConfig(
    **{
        **MOE,
        "experts": 16,
        "active_experts": 4,
        "shared_experts": 1,
        "score": "sigmoid",
        "router_bias": True,
        "normalized": True,
        "groups": 4,
        "active_groups": 2,
        "group_score": "top2_sum",
        "scale": 2.5,
    }
)


def _config(moe: MoEConfig, *, layers: int, q_lora_rank: int | None, mscale: float) -> Config:
    """Original context of 16 tokens, of which tests have twice as many."""
    return Config(
        name="tiny",
        architecture="deepseek",
        layers=layers,
        dim=64,
        vocab_size=256,
        context=640,
        heads=4,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        dense_layers=1,
        ffn_dim=96,
        moe=moe,
        norm_eps=1e-6,
        tied_embeddings=False,
        rope=read_rope(
            {
                "rope_theta": 10000.0,
                "rope_scaling": {"rope_type": "yarn", "factor": 40.0, "mscale": mscale, "mscale_all_dim": mscale},
            },
            16,
            YarnRope,
        ),
        init_std=0.02,
        attention_backend="auto",
    )


LITE = _config(LITE_MOE, layers=3, q_lora_rank=None, mscale=0.707)
V2 = _config(LIMITED_MOE, layers=2, q_lora_rank=24, mscale=1.0)
V3 = _config(V3_MOE, layers=3, q_lora_rank=24, mscale=1.0)

PARAMETERS = {"lite": 226_336, "v2": 142_768, "v3": 306_536}
"""Parameters of the same models of `transformers`."""
