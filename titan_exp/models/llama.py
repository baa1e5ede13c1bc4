"""Llama 2 to 3.2 (Touvron et al. 2023, Grattafiori et al. 2024): grouped-query attention, RoPE, SwiGLU."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import Violation
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, META, TORCHTUNE, decoder_map
from titan_exp.models.convert.hf_config import HuggingFace, common_fields, common_keys
from titan_exp.models.convert.rope_keys import read_rope
from titan_exp.models.convert.state_dict_map import StateDictMap
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.rope import RopeConfig, rope_violations
from titan_exp.models.spec.transformer import (
    TransformerConfig,
    shape_violations,
    transformer_layer,
    transformer_spec,
)

if TYPE_CHECKING:
    from titan_exp.models.blocks.transformer import TransformerBlock
    from titan_exp.ops.attention.sdpa import AttentionBackend


@dataclass(frozen=True)
class Config(TransformerConfig):
    """Shape of a Llama."""

    rope: RopeConfig
    """Rotary position embedding. E.g. `model.rope.theta=1e6`."""


def spec(config: Config) -> ModelSpec:
    """Layers of one kind; residual outputs start smaller by sqrt(2 · layers) (Radford et al. 2019)."""
    layer = transformer_layer(config, out_std=config.init_std / math.sqrt(2 * config.layers))
    return transformer_spec(config, (layer,) * config.layers)


def block(config: Config, layer: int, backend: "AttentionBackend") -> "TransformerBlock":
    """Pre-norm block with grouped-query attention and SwiGLU."""
    from titan_exp.models.blocks.transformer import TransformerBlock

    return TransformerBlock(spec(config).layers[layer], config.norm_eps, backend)


def violations(config: Config) -> Iterator[Violation]:
    """Shape violations of a Llama."""
    yield from shape_violations(config)
    yield from rope_violations(config.rope)


STATE_DICTS = {"huggingface": HUGGINGFACE, "llama": META, "torchtune": TORCHTUNE}
"""Parameter names by checkpoint format."""


def state_dict_map(config: Config, form: str) -> StateDictMap:
    """State-dict map from another tool's tensors to our parameters."""
    return decoder_map(spec(config), STATE_DICTS[form])


def _to_config_json(config: Config) -> dict[str, Any]:
    extra = {"intermediate_size": config.ffn_dim, "attention_bias": False, "mlp_bias": False}
    return common_keys(config, extra=extra)


def _from_config_json(values: Mapping[str, Any], name: str) -> Config:
    context = int(values.get("max_position_embeddings", 2048))
    rope = read_rope(values, context, RopeConfig)
    fields = {"ffn_dim": int(values["intermediate_size"]), **common_fields(values)}
    return Config(name=name, architecture="llama", context=context, rope=rope, **fields)


huggingface = HuggingFace(
    model_type="llama",
    architectures=("LlamaForCausalLM",),
    fixed={"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"},
    to_config=_to_config_json,
    from_config=_from_config_json,
)
"""`config.json` of Hugging Face's Llama."""
