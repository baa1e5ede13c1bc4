"""Llama 2 to 3.2 (Touvron et al. 2023, Grattafiori et al. 2024): grouped-query attention, RoPE, SwiGLU."""

import math
from dataclasses import dataclass

from titan_exp.models import family
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, META, TORCHTUNE
from titan_exp.models.convert.hf_config import HuggingFace
from titan_exp.models.convert.hf_keys import Key, attention_keys, both_ways, rope_keys
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.rope import RopeConfig
from titan_exp.models.spec.transformer import TransformerConfig, transformer_layer, transformer_spec


@dataclass(frozen=True)
class Config(TransformerConfig):
    """Shape of a Llama."""

    rope: RopeConfig
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""


def spec(config: Config) -> ModelSpec:
    """Layers of one kind; residual outputs start smaller by sqrt(2 · layers) (Radford et al. 2019)."""
    layer = transformer_layer(config, out_std=config.init_std / math.sqrt(2 * config.layers))
    return transformer_spec(config, (layer,) * config.layers)


STATE_DICTS = {"huggingface": HUGGINGFACE, "llama": META, "torchtune": TORCHTUNE}
"""Parameter names by checkpoint format."""
block, violations = family.block, family.violations
state_dict_map = family.decoder_maps(STATE_DICTS)

huggingface = HuggingFace(
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    **both_ways(
        Config,
        attention_keys(
            rope_keys(RopeConfig, context=2048),
            {"intermediate_size": Key("ffn_dim"), "attention_bias": False, "mlp_bias": False},
        ),
    ),
)
"""`config.json` of Hugging Face's Llama."""
