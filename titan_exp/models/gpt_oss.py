"""GPT-OSS (OpenAI 2025): sliding windows in every second layer, attention sinks, biases, experts with clamped SwiGLU.

Even layers have the window, odd layers full attention. The router has a bias, and weights are a softmax over the chosen
experts.
"""

from dataclasses import dataclass

from titan_exp.config.groups.types import PositiveFloat, PositiveInt
from titan_exp.models import family
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE
from titan_exp.models.convert.hf_keys import PLAIN_ROUTER, UNBALANCED, Key, attention_keys, huggingface_class, rope_keys
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.moe import MoEConfig, MoEVariant
from titan_exp.models.spec.rope import YarnRope
from titan_exp.models.spec.transformer import AttentionConfig, AttentionVariant, moe_transformer_layer, transformer_spec
from titan_exp.ops.swiglu_variant import SwiGLUVariant


@dataclass(frozen=True)
class Config(AttentionConfig):
    """Shape of a GPT-OSS."""

    rope: YarnRope
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""
    window: PositiveInt
    """Sliding window of every second layer, from the first on, in keys. It includes the token itself.
    E.g. `model=gpt_oss_debug model.window=64`."""
    swiglu_alpha: PositiveFloat
    """Factor inside the sigmoid of SwiGLU. E.g. `model=gpt_oss_debug model.swiglu_alpha=1`."""
    swiglu_limit: PositiveFloat
    """Upper bound of SwiGLU's gate, and of the magnitude of up. E.g. `model=gpt_oss_debug model.swiglu_limit=10`."""
    moe: MoEConfig
    """Experts in place of the feed-forward layer. E.g. `model=qwen3_moe_debug model.moe.experts=16`."""


def spec(config: Config) -> ModelSpec:
    """Spec: layers with and without a window, in turn."""
    std = config.init_std
    experts = MoEVariant(
        swiglu=SwiGLUVariant(config.swiglu_alpha, config.swiglu_limit, offset=1.0), bias_std=0.0, logit_bias_std=std
    )
    windowed, full = (
        moe_transformer_layer(
            config,
            config.moe,
            out_std=std,
            attention=AttentionVariant(window=window, sinks_std=std, bias_std=0.0),
            experts=experts,
        )
        for window in (config.window, None)
    )
    return transformer_spec(config, tuple(full if layer % 2 else windowed for layer in range(config.layers)))


STATE_DICTS = {
    "huggingface": HUGGINGFACE.but(
        {
            "feed_forward.router.weight": "mlp.router.weight",
            "feed_forward.router.logit_bias": "mlp.router.bias",
            "feed_forward.experts.gate_up": "mlp.experts.gate_up_proj",
            "feed_forward.experts.down": "mlp.experts.down_proj",
        },
        alternating_gate_up=True,
    )
}
block, violations = family.block, family.violations
state_dict_map = family.decoder_maps(STATE_DICTS)


_KEYS = {
    "intermediate_size": Key("moe.ffn_dim"),
    "num_local_experts": Key("moe.experts"),
    "num_experts_per_tok": Key("moe.active_experts"),
    # The files' coefficient is that of transformers, whose loss is off unless output_router_logits is set.
    "router_aux_loss_coef": Key(write=lambda config: config.moe.balance.coefficient),
    "sliding_window": Key("window"),
    "layer_types": Key(
        write=lambda config: ["full_attention" if layer % 2 else "sliding_attention" for layer in range(config.layers)],
        refusal="layer_types must alternate between sliding_attention and full_attention.",
    ),
    "swiglu_alpha": Key("swiglu_alpha", float, 1.702),
    "swiglu_limit": Key("swiglu_limit", float, 7.0),
    "attention_bias": True,
}

huggingface = huggingface_class(
    "gpt_oss",
    "GptOssForCausalLM",
    Config,
    attention_keys(rope_keys(YarnRope), _KEYS),
    {"moe.fp32_router": False, "moe.balance": UNBALANCED},
    router={**PLAIN_ROUTER, "normalized": True},
    called="GPT-OSS",
)
