"""`config.json` of diffusers models, written from a model config and read back."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation, listed
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.schema.component import builtin_components, component

CLASS = "_class_name"  # key of `config.json` that names the class


@dataclass(frozen=True)
class Diffusers:
    """A family's class in diffusers."""

    class_name: str
    fixed: Mapping[str, object]  # required values of keys in `config.json`; absent keys are accepted
    to_config: Callable[[Any], dict[str, Any]]
    from_config: Callable[[Mapping[str, Any], str], ModelConfig]  # the family's config from `config.json` and a name
    violations: Callable[[Any], Iterable[Violation]] = lambda config: ()
    """Values of the family's config that `config.json` cannot express."""


def to_diffusers(config: ModelConfig) -> dict[str, Any]:
    """Content of `config.json`. Raises UserError if the file cannot express the model."""
    family: Diffusers = component("model", config.architecture).diffusers
    violations = diffusers_violations(config)
    if violations:
        raise UserError(f"config.json of {family.class_name} cannot express this model.", violations)
    return {CLASS: family.class_name, **family.to_config(config)}


def diffusers_violations(config: ModelConfig) -> list[Violation]:
    """Values of a config that `config.json` cannot express."""
    return list(component("model", config.architecture).diffusers.violations(config))


def diffusers_class(config: ModelConfig) -> str:
    """Name of the model's class in diffusers."""
    return component("model", config.architecture).diffusers.class_name


def from_diffusers(values: Mapping[str, Any], name: str) -> ModelConfig:
    """Model config from the content of a `config.json`. Raises UserError if no family reads it, or it has parts that
    the family does not compute."""
    found = (getattr(component("model", family), "diffusers", None) for family in builtin_components("model"))
    families: dict[str, Diffusers] = {family.class_name: family for family in found if family is not None}
    if values.get(CLASS) not in families:
        raise UserError(f"config.json: {CLASS} is {values.get(CLASS)!r}. We read {listed(families, 'and')}.")
    family = families[values[CLASS]]
    for key, wanted in family.fixed.items():
        if values.get(key, wanted) != wanted:
            raise UserError(f"config.json: {key}={values[key]!r}, but our {family.class_name} has {key}={wanted!r}.")
    return family.from_config(values, name)


def from_bfl(shapes: Mapping[str, tuple[int, ...]], name: str) -> ModelConfig:
    """Model config from the tensor shapes of Black Forest Labs' file, which has no `config.json`. Raises UserError if
    no family reads these tensors."""
    for family in builtin_components("model"):
        read = getattr(component("model", family), "from_bfl_shapes", None)
        if read is not None:
            return read(shapes, name)
    raise UserError(f"{name} comes without a config.json. Give a folder that has one beside the weights.")
