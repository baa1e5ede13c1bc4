"""CompleteP (Dey et al. 2025, arXiv 2505.01618, table 1): muP, extended to keep hyperparameters the same at every
depth.

With l = layers / base depth and the exponent a, inside residual branches and beside the factors of `mup`: the output of
a branch is multiplied by l^-a, learning rates by l^(a-1), Adam's epsilon by l^-a, and initial weights are those of the
base depth. a = 1 is CompleteP, in which all layers learn features; a = 1/2 is depth-muP (Yang et al. 2023, Tensor
Programs VI, arXiv 2310.02244; Bordelon et al. 2023).
"""

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Interval

from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.training import BaseShapeConfig
from titan_exp.config.groups.types import PositiveInt
from titan_exp.models.parametrization.mup import block_parameters, width_scales
from titan_exp.models.parametrization.standard import ParameterScale, multiplier
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Config(BaseShapeConfig):
    """Fields of CompleteP."""

    base_depth: PositiveInt
    """Base depth: the `model.layers` at which the hyperparameters were tuned.
    E.g. `parametrization=completep parametrization.base_depth=12`."""
    depth_exponent: Annotated[float, Interval(ge=0.5, le=1)] = 1.0
    """Exponent a of the depth in the factor of residual branches, (layers / base_depth)^-a: 1 is CompleteP, and 0.5 is
    depth-muP. E.g. `parametrization=completep parametrization.depth_exponent=0.5`."""


def parameter_scales(spec: ModelSpec, model: ModelConfig, config: Config) -> dict[str, ParameterScale]:
    """Scale of every parameter by full name. A module of multi-token prediction is one block deep at any depth."""
    depth, exponent = len(spec.layers) / config.base_depth, config.depth_exponent
    base = model_spec(replace(model, layers=config.base_depth))
    assert base is not None, "the model has a spec"
    base_stds = {linear.name: linear.std for layer in base.blocks for linear in layer.linears}
    in_branch = ParameterScale(lr=depth ** (exponent - 1), eps=depth**-exponent)
    scales = width_scales(spec, model, config)
    for number, layer in enumerate(spec.layers):
        for name, linear in block_parameters(layer):
            scale = in_branch
            if linear is not None and name.endswith(".weight"):
                scale = replace(scale, init=base_stds.get(linear.name, linear.std) / linear.std)
            if name.rpartition(".")[0] in layer.residual_outputs:
                scale = scale.times(multiplier(depth**-exponent))
            scales[f"blocks.{number}.{name}"] = scales[f"blocks.{number}.{name}"].times(scale)
    return scales
