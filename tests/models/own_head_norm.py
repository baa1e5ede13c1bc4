"""A Llama with a norm over all heads between attention and its output, whose input the spec gathers."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan_exp.models import llama
from titan_exp.models.llama import violations
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec
from titan_exp.models.spec.tp_plan import Rowwise

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Config", "block", "spec", "violations"]


@dataclass(frozen=True)
class Config(llama.Config):
    """Shape of a Llama, and what its spec says of the norm."""

    gathers: str
    """Module whose input is gathered."""


def spec(config: Config) -> ModelSpec:
    """Layers whose output projection follows the norm."""
    plain = llama.spec(config)
    return replace(plain, layers=tuple(_normed(layer, config.gathers) for layer in plain.layers))


def block(config: Config, layer: int, backend: Any) -> "nn.Module":
    """A Llama's block with the norm."""
    from tests.models.own_head_norm_block import normed_block

    return normed_block(spec(config).layers[layer], config.norm_eps, backend)


def _normed(layer: LayerSpec, gathers: str) -> LayerSpec:
    out = replace(layer.linear("attention.out"), tp=Rowwise(gathers=gathers))
    return replace(layer, linears=tuple(out if part.name == out.name else part for part in layer.linears))
