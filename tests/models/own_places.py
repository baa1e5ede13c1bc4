"""A Llama that also learns its places, and in which each block begins with a depthwise convolution over time."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan_exp.models import llama
from titan_exp.models.llama import violations
from titan_exp.models.spec.model_spec import ModelSpec, PipelinePlan, TensorSpec

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Config", "block", "model", "spec", "violations"]


@dataclass(frozen=True)
class Config(llama.Config):
    """Shape of a Llama, and what is learned beside."""

    taps: int = 0
    """Tokens of the convolution; 0 for none."""
    local: bool = False
    """True if places are counted from the first token that is here."""


def spec(config: Config) -> ModelSpec:
    """A Llama's layers with a filter, and a table of places."""
    plain = llama.spec(config)
    filters = (TensorSpec("taps.weight", (config.dim, 1, config.taps), vectors=True),) if config.taps else ()
    layers = tuple(replace(layer, tensors=(*layer.tensors, *filters)) for layer in plain.layers)
    ends = (TensorSpec("norm.weight", (config.dim,)), TensorSpec("places.weight", (config.context, config.dim)))
    stages = PipelinePlan(first=("embedding", "places"), last=("norm", "head"))
    return replace(plain, layers=layers, ends=ends, stage_ends=stages)


def block(config: Config, layer: int, backend: Any) -> "nn.Module":
    """A Llama's block behind a convolution."""
    from tests.models.own_places_block import PlacesBlock

    return PlacesBlock(spec(config).layers[layer], config, backend)


def model(config: Config, *, seq_len: int, backend: Any) -> "nn.Module":
    """The decoder with a table of places."""
    from tests.models.own_places_block import PlacesDecoder

    blocks = {layer: block(config, layer, backend) for layer in range(config.layers)}
    return PlacesDecoder(spec(config), blocks, config, seq_len=seq_len)
