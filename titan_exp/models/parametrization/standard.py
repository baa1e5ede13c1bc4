"""Standard parametrization, with the configured hyperparameters at every shape, and what others scale: initial weights,
learning rate, weight decay and epsilon."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from titan_exp.config.errors.explained_errors import calling_user_code, package_prefix
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.training import ParametrizationConfig as Config
from titan_exp.config.schema.component import component
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec

__all__ = ["UNSCALED", "Config", "ParameterScale", "multiplier", "parameter_scales", "scales_of"]


@dataclass(frozen=True)
class ParameterScale:
    """Factors of one parameter's hyperparameters."""

    init: float = 1.0  # factor of initial values
    lr: float = 1.0  # factor of the learning rate
    weight_decay: float = 1.0  # factor of the weight decay
    eps: float = 1.0  # factor of Adam's epsilon
    inputs: float = 1.0
    """Number of inputs of a matrix, relative to the base model's. `lr` is for Adam; other optimizers derive theirs from
    `inputs` and `outputs`."""
    outputs: float = 1.0  # number of outputs of a matrix, relative to the base model's

    def times(self, other: "ParameterScale") -> "ParameterScale":
        """Multiply the factors of both scales."""
        return ParameterScale(*(getattr(self, field.name) * getattr(other, field.name) for field in fields(self)))


def multiplier(factor: float) -> ParameterScale:
    """Scale of w' = factor · w, which trains exactly like a multiplier `factor` in front of w.

    The update of Adam, and of every optimizer that `is_scale_invariant`, does not depend on the gradient's scale, which
    changes by 1 / factor: the update of w' is `factor` times that of w if epsilon is divided by the factor, and so is
    the decoupled decay of w' if the decay per learning rate is (Yang et al. 2022, Tensor Programs V, lemma J.1). No
    multiplier is left in the forward pass, so a checkpoint of any format holds the function that was trained.
    """
    return ParameterScale(init=factor, lr=factor, weight_decay=1 / factor, eps=1 / factor)


UNSCALED = ParameterScale()  # scale of parameters that train with the configured hyperparameters


def scales_of(parametrization: Config, model: ModelConfig) -> Mapping[str, ParameterScale]:
    """Scales by full parameter name. A parameter without one is unscaled, as are all parameters of a model without a
    spec."""
    spec, name = model_spec(model), parametrization.name
    if spec is None:
        return {}
    failure = f"parametrization.name={name}: its parameter_scales(spec, model, config) fails"
    with calling_user_code(failure, [package_prefix(name)]):
        return component("parametrization", name).parameter_scales(spec, model, parametrization)


def parameter_scales(spec: ModelSpec, model: ModelConfig, config: Config) -> dict[str, ParameterScale]:
    """Return no scales: every parameter is unscaled."""
    return {}
