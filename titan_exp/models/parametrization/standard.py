"""Standard parametrization: uses the configured hyperparameters at every shape."""

from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.training import ParametrizationConfig as Config
from titan_exp.models.parametrization.parameter_scale import ParameterScale
from titan_exp.models.spec.model_spec import ModelSpec

__all__ = ["Config", "parameter_scales"]


def parameter_scales(spec: ModelSpec, model: ModelConfig, config: Config) -> dict[str, ParameterScale]:
    """Return no scales: every parameter is unscaled."""
    return {}
