"""A family whose layers have every kind of attention: window, chunks, sinks, biases, norm after RoPE, temperature."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_exp.models import llama
from titan_exp.models.convert.decoder_state_dict import HUGGINGFACE, decoder_map
from titan_exp.models.llama import violations
from titan_exp.models.spec.mixers import QueryTemperature
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.models.spec.transformer import AttentionVariant, transformer_layer, transformer_spec

if TYPE_CHECKING:
    from titan_exp.models.blocks.transformer import TransformerBlock

__all__ = ["Config", "block", "spec", "state_dict_map", "violations"]


@dataclass(frozen=True)
class Config(llama.Config):
    """Shape of a Llama, with limits of its attention."""

    window: int
    """Window of the first layer."""
    chunk: int
    """Chunk of the third layer."""


def variants(config: Config) -> tuple[AttentionVariant, ...]:
    """Attention of four layers."""
    return (
        AttentionVariant(window=config.window, sinks_std=1.0, bias_std=0.1),
        AttentionVariant(sinks_std=1.0, bias_std=0.1),
        AttentionVariant(chunk=config.chunk, rotated_norm_eps=1e-5),
        AttentionVariant(rope=False, temperature=QueryTemperature(20.0, 8)),
    )


def spec(config: Config) -> ModelSpec:
    """Four kinds of layers in turn."""
    out_std, kinds = config.init_std / math.sqrt(2 * config.layers), variants(config)
    layers = (
        transformer_layer(config, out_std=out_std, attention=kinds[layer % len(kinds)])
        for layer in range(config.layers)
    )
    return transformer_spec(config, tuple(layers))


def block(config: Config, layer: int, backend: Any) -> "TransformerBlock":
    """Pre-norm block with the layer's attention."""
    from titan_exp.models.blocks.transformer import TransformerBlock

    return TransformerBlock(spec(config).layers[layer], config.norm_eps, backend)


def state_dict_map(config: Config, form: str) -> Any:
    """Map of Hugging Face's names."""
    return decoder_map(spec(config), {"huggingface": HUGGINGFACE}[form])
