"""A Llama with one fault of a user's kind, or the honest form of the same code: what differs is in its block."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan_exp.models import llama
from titan_exp.models.llama import violations
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec, TensorSpec, VectorSpec

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Config", "block", "model", "spec", "violations"]


@dataclass(frozen=True)
class Config(llama.Config):
    """Shape of a Llama, and the code that its blocks have in addition."""

    planted: str
    """Name of a function or module of `own_planted_block`; empty for none."""


def spec(config: Config) -> ModelSpec:
    """A Llama's layers with a gain, where the planted code has one."""
    plain = llama.spec(config)
    return replace(plain, layers=tuple(_with_gain(layer, config) for layer in plain.layers))


def block(config: Config, layer: int, backend: Any) -> "nn.Module":
    """A Llama's block with the planted code."""
    from tests.models.own_planted_block import PlantedBlock

    return PlantedBlock(spec(config).layers[layer], config, layer, backend)


def model(config: Config, *, seq_len: int, backend: Any) -> "nn.Module":
    """The decoder, which some code is planted in."""
    from tests.models.own_planted_block import PlantedDecoder

    blocks = {layer: block(config, layer, backend) for layer in range(config.layers)}
    return PlantedDecoder(spec(config), blocks, seq_len=seq_len, planted=config.planted)


def _with_gain(layer: LayerSpec, config: Config) -> LayerSpec:
    if not config.planted.endswith("gain"):
        return layer
    if config.planted == "one_gain":
        return replace(layer, tensors=(*layer.tensors, TensorSpec("gain.weight", (1,))))
    size = config.head_dim if config.planted.endswith("head_gain") else config.dim
    return replace(layer, vectors=(*layer.vectors, VectorSpec("gain", size)))
