"""Model spec of a config, looked up by architecture, and roles of its parameters. Imports no torch."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import lru_cache

from titan_exp.config.errors.explained_errors import calling_user_code, package_prefix
from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.optimizer import Role
from titan_exp.config.schema.component import component
from titan_exp.models.spec.model_spec import ModelSpec


def model_spec(config: ModelConfig) -> ModelSpec | None:
    """Spec of a model; None for a plain class. Raises UserError if the architecture's import path cannot be
    imported."""
    try:
        return _cached_spec(config)
    except TypeError:  # a user's config with a list in it has no hash
        return _spec(config)


def family_violations(config: ModelConfig) -> Iterator[Violation]:
    """Violations by shapes that the model's family cannot compute."""
    rules = getattr(component("model", config.architecture), "violations", None)
    if rules is not None:
        with _calling("violations", config):
            yield from list(rules(config))


def token_mixing(config: ModelConfig) -> str | None:
    """Sentence about a module that mixes tokens outside attention; None if there is none, or the family does not
    say."""
    find = getattr(component("model", config.architecture), "token_mixing", None)
    if find is None:
        return None
    with _calling("token_mixing", config):
        found: str | None = find(config)
    return found


def has_experts(config: ModelConfig) -> bool:
    """True if a layer of the model routes tokens to experts; False for a plain class."""
    spec = model_spec(config)
    return spec is not None and spec.has_experts


def has_routers(config: ModelConfig) -> bool:
    """True if a layer of the model has a router of ours, which counts tokens; False for a plain class."""
    spec = model_spec(config)
    return spec is not None and any(True for _ in spec.routers())


def block_count(config: ModelConfig) -> int:
    """Number of blocks, modules of multi-token prediction included."""
    spec = model_spec(config)
    return config.layers if spec is None else len(spec.blocks)


def mtp_depth(config: ModelConfig) -> int:
    """Number of modules of multi-token prediction; 0 for a plain class."""
    spec = model_spec(config)
    return 0 if spec is None else len(spec.mtp_layers)


def with_mtp_depth(config: ModelConfig, depth: int) -> ModelConfig:
    """The same model with `depth` modules of multi-token prediction; unchanged if it has no such key."""
    has_key = any(field.name == "mtp" for field in fields(config))
    return replace(config, mtp=replace(config.mtp, depth=depth)) if has_key else config  # type: ignore[attr-defined]


def attention_backend(config: ModelConfig) -> str:
    """Requested attention kernel; `auto` for a model that describes no attention."""
    spec = model_spec(config)
    return "auto" if spec is None else spec.attention_backend


def with_key(config: ModelConfig, key: str, value: object) -> ModelConfig:
    """The same model with another value of a key, such as another kernel; unchanged if it has no such key."""
    return replace(config, **{key: value}) if any(field.name == key for field in fields(config)) else config


def _spec(config: ModelConfig) -> ModelSpec | None:
    family = component("model", config.architecture)
    with _calling("spec", config):
        return family.spec(config)


_cached_spec = lru_cache(maxsize=256)(_spec)


def _calling(function: str, config: ModelConfig) -> AbstractContextManager[None]:
    name = config.architecture
    return calling_user_code(f"model.architecture={name}: its {function}(config) fails", [package_prefix(name)])


def parameter_roles(spec: ModelSpec) -> dict[str, Role]:
    """Role of every parameter by full name, as an optimizer sees it."""
    stacked = {f"{name}.{part}" for name, linear in spec.linears() if linear.experts > 1 for part in ("weight", "bias")}
    vectors = {
        f"blocks.{number}.{tensor.name}"
        for number, layer in enumerate(spec.blocks)
        for tensor in layer.tensors
        if tensor.vectors
    }
    ends: dict[str, Role] = {"embedding.weight": "embedding", "head.weight": "head"}
    return {
        name: "vector"
        if name in vectors or is_vector(shape, stacked=name in stacked)
        else ends.get(name, "expert" if name in stacked or len(shape) > 2 else "matrix")
        for name, shape in spec.shapes.items()
    }


def is_vector(shape: Sequence[int], *, stacked: bool) -> bool:
    """True for a vector, for a stack of one vector per expert, and for numbers per head that broadcast, like [1, 1,
    heads, 1]. Two dims make a matrix even if one has size 1: a linear layer with one output."""
    return len(shape) - stacked < 2 or (len(shape) > 2 and sum(size > 1 for size in shape) < 2)
