"""Scales of a model's parameters by its parametrization. Imports no torch."""

from collections.abc import Mapping

from titan_exp.config.errors.user_traceback import calling_user_code, package_prefix
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.parametrization import ParametrizationConfig
from titan_exp.config.schema.component import component
from titan_exp.models.parametrization.parameter_scale import ParameterScale
from titan_exp.models.spec.lookup import model_spec


def scales_of(parametrization: ParametrizationConfig, model: ModelConfig) -> Mapping[str, ParameterScale]:
    """Scales by full parameter name; parameters without one are unscaled, as all are of a model without a spec."""
    spec, name = model_spec(model), parametrization.name
    if spec is None:
        return {}
    failure = f"parametrization.name={name}: its parameter_scales(spec, model, config) fails"
    with calling_user_code(failure, [package_prefix(name)]):
        return component("parametrization", name).parameter_scales(spec, model, parametrization)
