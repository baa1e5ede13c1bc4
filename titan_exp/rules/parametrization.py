"""Parametrization rules: what a spec must describe, keys of base shapes, optimizers with known scaling."""

from collections.abc import Iterator
from typing import Any

from titan_exp.config.errors.user_error import Violation, did_you_mean
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.optimizer import OptimizerConfig
from titan_exp.config.groups.training import BaseShapeConfig, ParametrizationConfig
from titan_exp.models.parametrization.mup import fixed_inputs
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec
from titan_exp.rules.rule import Refuse, rules

_NAME = "parametrization.name"


def spec_describes_the_parts(
    spec: ModelSpec, model: ModelConfig, parametrization: ParametrizationConfig
) -> Iterator[Violation]:
    """The spec says what writes to the residual stream, and describes every other parameter's part."""
    if not isinstance(parametrization, BaseShapeConfig):
        return
    name, missing = model.architecture, ""
    if spec.ends is not None or any(layer.tensors for layer in spec.blocks):
        missing = "describes parameters by their shape only, not by their part in the model"
    elif not all(layer.residual_outputs for layer in spec.blocks):
        missing = (
            "says of no part that it writes to the residual stream (writes_residual of a LinearSpec or VectorSpec)"
        )
    if missing:
        yield Violation(_NAME, parametrization.name, f"the spec of {name} {missing}", "parametrization=standard")


def fixed_keys_set_inputs(
    spec: ModelSpec, model: ModelConfig, parametrization: ParametrizationConfig
) -> Iterator[Violation]:
    """Fixed keys are numbers of the model on which the inputs of a linear layer depend."""
    if not isinstance(parametrization, BaseShapeConfig):
        return
    numbers = _numbers(model)
    for key in parametrization.fixed:
        field = "parametrization.fixed"
        if key not in numbers:
            offer = did_you_mean(key, numbers) or "a key of the group model without its prefix, such as ffn_dim"
            yield Violation(field, key, "the model has no such number", offer)
        elif key == "dim":
            yield Violation(field, key, "it is the width that grows", "leave it out, or parametrization=standard")
        elif not fixed_inputs(model, (key,)):
            yield Violation(field, key, "no linear layer has inputs that depend on it", "leave it out")


def scores_can_be_scaled(spec: ModelSpec, parametrization: ParametrizationConfig) -> Iterator[Violation]:
    """Weights of every layer's attention determine the scale of its scores, where heads grow."""
    if not isinstance(parametrization, BaseShapeConfig) or parametrization.base_head_dim is None:
        return
    for layer in dict.fromkeys(spec.blocks):
        if (reason := _unscalable(layer, parametrization.base_head_dim)) is not None:
            field, value = "parametrization.base_head_dim", parametrization.base_head_dim
            assert layer.attention is not None
            remedy = f"{field}=null, or the model's {layer.attention.qk_dim} ({layer.attention.qk_dim_key})"
            yield Violation(field, value, reason, remedy)
            return


def _unscalable(layer: LayerSpec, base_head_dim: int) -> str | None:
    attention = layer.attention
    if attention is None or attention.qk_dim == base_head_dim:
        return None
    if attention.rotated_norm_eps is not None:
        return "a norm without weight follows the projections of queries and keys, so that no weight scales the scores"
    names = {linear.name for linear in layer.linears}
    if not names >= {"attention.q"} and not names >= {"attention.qkv", "attention.out"}:
        return "the attention has no linear layers attention.qkv and attention.out, or attention.q"
    return None


def _numbers(config: Any, prefix: str = "") -> list[str]:
    """Keys of a config whose values are numbers, nested ones included."""
    found = []
    for name, value in vars(config).items():
        if isinstance(value, int) and not isinstance(value, bool):
            found.append(f"{prefix}{name}")
        elif hasattr(value, "__dataclass_fields__"):
            found += _numbers(value, f"{prefix}{name}.")
    return found


def optimizer_has_rules(optimizer: OptimizerConfig, parametrization: ParametrizationConfig) -> Iterator[Violation]:
    """Learning rates of a parametrization are for optimizers whose updates do not depend on the scale of gradients."""
    if isinstance(parametrization, BaseShapeConfig) and not optimizer.is_scale_invariant:
        reason = f"it has no learning rates for optimizer.name={optimizer.name} as configured"
        remedy = "optimizer=adamw, lion, dion or muon (its heads in one matrix), or parametrization=standard"
        yield Violation(_NAME, parametrization.name, reason, remedy)


PARAMETRIZATION_RULES = rules(
    Refuse(
        _NAME,
        lambda parametrization, model: parametrization.name != "standard" and model_spec(model) is None,
        "model.architecture={model.architecture} is a plain class, and has no spec to read shapes from",
        "parametrization=standard, or a module with a spec (titan-exp help extending)",
    ),
    spec_describes_the_parts,
    fixed_keys_set_inputs,
    scores_can_be_scaled,
    optimizer_has_rules,
)
