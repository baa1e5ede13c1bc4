"""OLMo 2 (Team OLMo 2024): norms after attention and feed-forward, and over queries and keys of all heads before RoPE.

Residual branches read the stream as it is, and all weights start with one standard deviation.
"""

from dataclasses import dataclass

from titan_exp.models import family
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE
from titan_exp.models.convert.hf_keys import Key, attention_keys, huggingface_class, rope_keys
from titan_exp.models.spec import transformer
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.rope import ScaledRope


@dataclass(frozen=True)
class Config(transformer.TransformerConfig):
    """Shape of an OLMo 2."""

    rope: ScaledRope
    """Rotary position embedding."""


def spec(config: Config) -> ModelSpec:
    """Spec: layers of one kind, with norms after both branches."""
    attention = transformer.AttentionVariant(qk_norm="all_heads")
    layer = transformer.post_normed(transformer.transformer_layer(config, out_std=config.init_std, attention=attention))
    return transformer.transformer_spec(config, (layer,) * config.layers)


STATE_DICTS = {
    "huggingface": HUGGINGFACE.but(
        {"attention_norm": "post_attention_layernorm.weight", "feed_forward_norm": "post_feedforward_layernorm.weight"}
    )
}
block, violations = family.block, family.violations
state_dict_map = family.decoder_maps(STATE_DICTS)

_KEYS = {
    "rms_norm_eps": Key("norm_eps", float, 1e-5),
    "intermediate_size": Key("ffn_dim"),
    "attention_bias": False,
    # Without this, the class takes the first OLMo's ids, and gives row 1 of the embedding no gradient.
    "pad_token_id": Key(write=lambda _: None),
    "eos_token_id": Key(write=lambda _: None),
}

huggingface = huggingface_class("olmo2", "Olmo2ForCausalLM", Config, attention_keys(rope_keys(ScaledRope), _KEYS))
