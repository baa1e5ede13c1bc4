"""A family without attention: each token mixes with the ones before it through a learned running mean."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.models.spec.model_spec import LayerSpec, LinearSpec, ModelSpec, VectorSpec

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Config(ModelConfig):
    """No heads, no RoPE, no attention kernel."""

    decay: float
    """Weight of the tokens before in the running mean."""


def spec(config: Config) -> ModelSpec:
    """One square linear per block, replicated under tensor parallelism."""
    mix = LinearSpec("mix", config.dim, config.dim, 0.02, tp=None)
    layer = LayerSpec(None, (mix,), (VectorSpec("norm", config.dim),))
    return ModelSpec((layer,) * config.layers, config.dim, config.vocab_size, False, 1e-5, 0.02)


def block(config: Config, layer: int, backend: Any) -> "nn.Module":
    """Norm, running mean, linear, residual."""
    from tests.models.own_mixer_block import MixerBlock

    return MixerBlock(config.dim, config.decay)
