"""Maximal update parametrization for Adam (Yang et al. 2022, Tensor Programs V, arXiv 2203.03466), by width.

With m = dim / base width, relative to the base model (table 3, equal to table 8 with its multiplier in the weights):

| parameter | initial std | learning rate | weight decay | epsilon |
|---|---|---|---|---|
| embedding, norms, biases | 1 | 1 | 1 | 1/m |
| matrix with growing inputs | 1/sqrt(m) | 1/m | m | 1/m |
| head, router | 1/m | 1/m | m | 1 |
| final norm instead of a tied head | 1/m | 1/m | m | 1 |

Decoupled weight decay acts as learning rate times decay, and is the same at every width. Gradients shrink as 1/m, and
epsilon with them. Scores of attention are divided by the width of a head, not by its root.
"""

from dataclasses import dataclass

from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.parametrization import BaseShapeConfig
from titan_exp.models.parametrization.base_shape import width_scales
from titan_exp.models.parametrization.parameter_scale import ParameterScale
from titan_exp.models.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class Config(BaseShapeConfig):
    """Fields of muP."""


def parameter_scales(spec: ModelSpec, model: ModelConfig, config: Config) -> dict[str, ParameterScale]:
    """Scale of every parameter by full name."""
    return width_scales(spec, model, config)
