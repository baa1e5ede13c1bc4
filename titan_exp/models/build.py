"""Models by architecture: a built-in family, your module with the same public names, or your plain class."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.schema.component import component, is_builtin
from titan_exp.config.secrets import revealed
from titan_exp.models.blocks.linear import InitSpec
from titan_exp.models.decoder import Decoder
from titan_exp.models.parametrization.standard import ParameterScale
from titan_exp.models.spec.lookup import model_spec
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.ops.attention.sdpa import AttentionBackend, choose_backend


def build_model(config: ModelConfig, *, seq_len: int, attention_backend: AttentionBackend) -> nn.Module:
    """Build the model on the current default device (meta, in training). A family's blocks go into the skeleton
    `Decoder`, unless the family builds its model itself by a public `model(config, seq_len=..., backend=...)`. Raises
    UserError if the import path cannot be imported, or the family's spec describes other parameters."""
    family, spec = component("model", config.architecture), model_spec(config)
    config = config if is_builtin("model", config.architecture) else revealed(config, "model")
    if hasattr(family, "model"):
        model = family.model(config, seq_len=seq_len, backend=attention_backend)
    else:
        assert spec is not None, "only plain classes have no spec"
        blocks = {layer: family.block(config, layer, attention_backend) for layer in range(len(spec.blocks))}
        model = Decoder(spec, blocks, seq_len=seq_len)
    if spec is not None:
        _require_described(model, spec, config.architecture)
    return model


def choose_attention_backend(
    config: ModelConfig,
    device: torch.device,
    *,
    bf16: bool,
    seq_len: int,
    documents: bool,
    parts: bool = False,
    deterministic: bool = False,
    auto: bool = False,
) -> AttentionBackend:
    """Attention kernel for a model on a device: the one of its config, or `auto`. `seq_len` is the longest sequence in
    tokens. `documents` says that document masks are used, `parts` that context-parallel ranks exchange keys and values,
    `deterministic` that every run must give the same bits."""
    spec = model_spec(config)
    requested = "auto" if auto or spec is None else spec.attention_backend
    return choose_backend(
        requested,
        device,
        head_dims=[] if spec is None else [head_dim for _, head_dim in spec.head_dims],
        bf16=bf16,
        documents=documents,
        masked=spec is not None and (spec.has_sinks or spec.is_masked(seq_len)),
        parts=parts,
        deterministic=deterministic,
    )


def init_specs(model: nn.Module, scales: Mapping[str, ParameterScale] = {}) -> dict[str, InitSpec] | None:
    """Initialization of every parameter by full name, scaled by the parametrization; None if the model does not declare
    them all."""
    table = {
        f"{path}.{name}" if path else name: init
        for path, module in model.named_modules()
        if hasattr(module, "init_spec")
        for name, init in module.init_spec().items()  # type: ignore[operator]  # the blocks' own method
    }
    table |= {name: replace(table[name], scale=scale.init) for name, scale in scales.items() if name in table}
    return table if all(name in table for name, _ in model.named_parameters()) else None


def parameter_count(model: nn.Module) -> int:
    """Number of parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """FLOPs of a training step per token, from the model's spec; without a spec, 6 per parameter."""
    if hasattr(model, "flops_per_token"):
        return model.flops_per_token(seq_len)  # type: ignore[operator]  # a method, not a submodule
    return 6.0 * parameter_count(model)


def _require_described(model: nn.Module, spec: ModelSpec, architecture: str) -> None:
    """Refuse a spec that differs from the model, since sharding, planner and export would follow it."""
    built = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in dict.fromkeys([*built, *spec.shapes]):
        if built.get(name) != spec.shapes.get(name):
            raise UserError(
                f"{architecture}: {name} has the shape {spec.shapes.get(name, 'none')} in `spec` and "
                f"{built.get(name, 'none')} in the model. Correct `spec` or `block`."
            )
