"""GPT-OSS (OpenAI 2025): sliding windows in every second layer, attention sinks, biases, experts with clamped SwiGLU.

Even layers have the window, odd ones full attention. The router has a bias, and weights are a softmax over the chosen
experts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.types import PositiveFloat, PositiveInt
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, decoder_map
from titan_exp.models.convert.hf_config import (
    PLAIN_ROUTER,
    HuggingFace,
    common_fields,
    common_keys,
    routed_experts,
    router_violations,
)
from titan_exp.models.convert.rope_keys import read_rope
from titan_exp.models.convert.state_dict_map import StateDictMap
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.moe import BalanceConfig, MoEConfig, MoEVariant
from titan_exp.models.spec.moe_layer import moe_violations
from titan_exp.models.spec.rope import YarnRope, rope_violations
from titan_exp.models.spec.transformer import (
    AttentionConfig,
    AttentionVariant,
    attention_violations,
    moe_transformer_layer,
    transformer_spec,
)
from titan_exp.ops.swiglu_variant import SwiGLUVariant

if TYPE_CHECKING:
    from titan_exp.models.blocks.transformer import TransformerBlock
    from titan_exp.ops.attention.sdpa import AttentionBackend


@dataclass(frozen=True)
class Config(AttentionConfig):
    """Shape of a GPT-OSS."""

    rope: YarnRope
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""
    window: PositiveInt
    """Sliding window of even layers in keys, the token itself included. E.g. `model=gpt_oss_debug model.window=64`."""
    swiglu_alpha: PositiveFloat
    """Factor inside the sigmoid of SwiGLU. E.g. `model=gpt_oss_debug model.swiglu_alpha=1`."""
    swiglu_limit: PositiveFloat
    """Upper bound of SwiGLU's gate, and of |up|. E.g. `model=gpt_oss_debug model.swiglu_limit=10`."""
    moe: MoEConfig
    """Experts in place of the feed-forward layer. E.g. `model=qwen3_moe_debug model.moe.experts=16`."""


def spec(config: Config) -> ModelSpec:
    """Layers with a window and without, in turn."""
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


def block(config: Config, layer: int, backend: "AttentionBackend") -> "TransformerBlock":
    """Pre-norm block with the layer's window, and experts."""
    from titan_exp.models.blocks.transformer import TransformerBlock

    return TransformerBlock(spec(config).layers[layer], config.norm_eps, backend)


def violations(config: Config) -> Iterator[Violation]:
    """Shape violations of a GPT-OSS."""
    yield from attention_violations(config)
    yield from rope_violations(config.rope)
    yield from moe_violations(config.moe)


NAMES = replace(
    HUGGINGFACE,
    router="model.layers.{}.mlp.router.weight",
    router_logit_bias="model.layers.{}.mlp.router.bias",
    experts_gate_up="model.layers.{}.mlp.experts.gate_up_proj",
    alternating_gate_up=True,
    expert_down="model.layers.{}.mlp.experts.down_proj",
)
"""Names of `transformers`."""


def state_dict_map(config: Config, form: str) -> StateDictMap:
    """State-dict map from Hugging Face's tensors to our parameters."""
    return decoder_map(spec(config), {"huggingface": NAMES}[form])


def _layer_types(layers: int) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


def _to_config_json(config: Config) -> dict[str, Any]:
    moe = config.moe
    extra = {
        "intermediate_size": moe.ffn_dim,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.active_experts,
        "router_aux_loss_coef": moe.balance.coefficient,
        "sliding_window": config.window,
        "layer_types": _layer_types(config.layers),
        "swiglu_alpha": config.swiglu_alpha,
        "swiglu_limit": config.swiglu_limit,
        **_FIXED,
    }
    return common_keys(config, extra=extra)


def _from_config_json(values: Mapping[str, Any], name: str) -> Config:
    context, layers = int(values["max_position_embeddings"]), int(values["num_hidden_layers"])
    if values.get("layer_types", _layer_types(layers)) != _layer_types(layers):
        raise UserError("config.json: layer_types is another order than sliding_attention and full_attention in turn.")
    return Config(
        name=name,
        architecture="gpt_oss",
        context=context,
        rope=read_rope(values, context, YarnRope),
        window=int(values["sliding_window"]),
        swiglu_alpha=float(values.get("swiglu_alpha", 1.702)),
        swiglu_limit=float(values.get("swiglu_limit", 7.0)),
        moe=MoEConfig(
            experts=routed_experts(values, "num_local_experts"),
            active_experts=int(values["num_experts_per_tok"]),
            ffn_dim=int(values["intermediate_size"]),
            # The files' coefficient is that of transformers, whose loss is off unless output_router_logits is set.
            balance=BalanceConfig("none", 0.0, 0.0, 0.0, centered_bias=True),
            fp32_router=False,
            **_ROUTING,
        ),
        **common_fields(values),
    )


_ROUTING: dict[str, Any] = {**PLAIN_ROUTER, "normalized": True}
"""Fields of `MoEConfig` that `config.json` has no keys for."""

_FIXED = {"attention_bias": True, "hidden_act": "silu"}

huggingface = HuggingFace(
    model_type="gpt_oss",
    architectures=("GptOssForCausalLM",),
    fixed=_FIXED,
    to_config=_to_config_json,
    from_config=_from_config_json,
    violations=lambda config: router_violations(config.moe, _ROUTING, "GPT-OSS"),
)
"""`config.json` of Hugging Face's GPT-OSS."""
