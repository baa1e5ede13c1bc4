"""Maximal update parametrization for Adam (Yang et al. 2022, Tensor Programs V, arXiv 2203.03466), by width.

With m = dim / base width, relative to the base model (table 3, equal to table 8 with its multiplier in the weights):

| parameter | initial std | learning rate | weight decay | epsilon |
|---|---|---|---|---|
| embedding, norms, biases | 1 | 1 | 1 | 1/m |
| matrix with growing inputs | 1/sqrt(m) | 1/m | m | 1/m |
| head, router | 1/m | 1/m | m | 1 |
| final norm instead of a tied head | 1/m | 1/m | m | 1 |

Decoupled weight decay acts as learning rate times decay, which stays the same at every width. Gradients shrink as 1/m,
and epsilon with them. Attention scores are divided by the head width, not by its root.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.training import BaseShapeConfig
from titan_exp.models.parametrization.standard import ParameterScale, multiplier
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import LayerSpec, LinearSpec, ModelSpec


@dataclass(frozen=True)
class Config(BaseShapeConfig):
    """Fields of muP."""


def parameter_scales(spec: ModelSpec, model: ModelConfig, config: Config) -> dict[str, ParameterScale]:
    """Scale of every parameter by full name."""
    return width_scales(spec, model, config)


def width_scales(spec: ModelSpec, model: ModelConfig, config: BaseShapeConfig) -> dict[str, ParameterScale]:
    """muP's scale of every parameter by full name, by the table above."""
    growth = spec.dim / config.base_width
    fixed, fixed_outputs = (fixed_sizes(model, config.fixed, side) for side in ("inputs", "outputs"))
    small_gradients = ParameterScale(eps=1 / growth)
    hidden = ParameterScale(init=growth**-0.5, lr=1 / growth, weight_decay=growth, eps=1 / growth, inputs=growth)
    output = small_gradients.times(multiplier(1 / growth))
    scales = dict.fromkeys(spec.shapes, small_gradients)
    for number, layer in enumerate(spec.blocks):
        prefix = f"blocks.{number}"
        for linear in layer.linears:
            scale = small_gradients if linear.name in fixed else hidden
            outputs = 1.0 if linear.name in fixed_outputs else growth
            scales[f"{prefix}.{linear.name}.weight"] = replace(scale, outputs=outputs)
        if layer.router is not None:
            scales[f"{prefix}.{layer.router.name}.weight"] = replace(output, inputs=growth)
        for name, scale in _score_scales(layer, config.base_head_dim).items():
            scales[f"{prefix}.{name}"] = scales[f"{prefix}.{name}"].times(scale)
    embedded = multiplier(config.embedding_multiplier)
    scales["embedding.weight"] = scales["embedding.weight"].times(embedded)
    # A tied head has the embedding's factor, and the final norm takes the rest.
    shared = config.embedding_multiplier if spec.tied else 1.0
    last = "norm.weight" if spec.tied else "head.weight"
    scales[last] = output.times(multiplier(config.output_multiplier / shared))
    return scales


def block_parameters(layer: LayerSpec) -> Iterator[tuple[str, LinearSpec | None]]:
    """Parameters of a block by name, each with the linear layer that it belongs to."""
    linears = {linear.name: linear for linear in layer.linears}
    for name in layer.shapes:
        yield name, linears.get(name.rpartition(".")[0])


def fixed_sizes(model: ModelConfig, keys: tuple[str, ...], side: Literal["inputs", "outputs"]) -> frozenset[str]:
    """Linear layers of a block, by module path, whose number of inputs or outputs depends on one of these keys."""
    sizes, fixed = _sizes(model, side), set[str]()
    for key in keys:
        changed = _sizes(_with_other_value(model, key.split(".")), side)
        fixed |= {name for name, count in sizes.items() if changed.get(name) != count}
    return frozenset(fixed)


def _sizes(model: ModelConfig, side: Literal["inputs", "outputs"]) -> dict[str, int]:
    spec = model_spec(model)
    assert spec is not None, "the model has a spec"
    return {linear.name: getattr(linear, side) for layer in spec.blocks for linear in layer.linears}


def _with_other_value(config: Any, parts: list[str]) -> Any:
    """Copy of the config with another value for the number at a key path."""
    value = getattr(config, parts[0])
    return replace(config, **{parts[0]: 2 * value if len(parts) == 1 else _with_other_value(value, parts[1:])})


def _score_scales(layer: LayerSpec, base_head_dim: int | None) -> dict[str, ParameterScale]:
    """Scales that multiply attention scores by sqrt(base head width / head width), by name in the block. They go into
    the norm of queries or into the queries' linear layer. In a fused qkv, queries and keys take the root each, and the
    output projection takes it back from the values."""
    attention = layer.attention
    if base_head_dim is None or attention is None or attention.qk_dim == base_head_dim:
        return {}
    factor = (base_head_dim / attention.qk_dim) ** 0.5
    linears = {linear.name: linear for linear in layer.linears}
    if layer.vector("attention.q_norm") is not None:
        return {"attention.q_norm.weight": multiplier(factor)}
    if "attention.q" in linears:
        return {"attention.q.weight": multiplier(factor)}
    root = multiplier(factor**0.5)
    scales = {"attention.qkv.weight": root, "attention.out.weight": multiplier(factor**-0.5)}
    return scales | ({"attention.qkv.bias": root} if linears["attention.qkv"].bias else {})
