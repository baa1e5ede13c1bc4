"""A tiny FLUX.1 with every feature, in diffusers and here, and inputs for both."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titan_exp.extensions.diffusion.flux import Config, diffusers
from titan_exp.extensions.diffusion.samples import grid_positions
from titan_exp.models.build import build_model
from titan_exp.models.convert.state_dict_map import CheckpointFormat, state_dict_map

needs_diffusers = pytest.mark.skipif(find_spec("diffusers") is None, reason="diffusers is not installed")

TINY_DIFFUSERS: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 24,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}

TEXT_TOKENS, ROWS, COLUMNS = 7, 3, 5


def tiny(**changes: Any) -> Config:
    """Our shape of `TINY_DIFFUSERS`, read as its `config.json` is."""
    config = diffusers.from_config({**TINY_DIFFUSERS, **changes}, "tiny")
    assert isinstance(config, Config)
    return config


def tiny_model(config: Config) -> nn.Module:
    """Our model on the CPU, its weights undefined."""
    model = build_model(config, seq_len=32, attention_backend="math")
    model.reset_buffers()  # type: ignore[operator]  # the skeleton's own
    return model


def tiny_inputs(*, guidance: bool = True) -> dict[str, Tensor]:
    """Inputs of two sequences."""
    random = torch.Generator().manual_seed(0)
    inputs = {
        "image": torch.randn(2, ROWS * COLUMNS, 16, generator=random),
        "text": torch.randn(2, TEXT_TOKENS, 32, generator=random),
        "pooled": torch.randn(2, 24, generator=random),
        "times": torch.tensor([0.3, 0.871]),
        "positions": grid_positions(TEXT_TOKENS, ROWS, COLUMNS),
    }
    return {**inputs, "guidance": torch.tensor([3.5, 1.0])} if guidance else inputs


def tiny_in_diffusers(**changes: Any) -> Any:
    """Diffusers' model with noise for every weight: modulations and output begin at zero, and would hide the rest."""
    model = import_module("diffusers").FluxTransformer2DModel(**{**TINY_DIFFUSERS, **changes})
    fill(model)
    return model


def fill(model: nn.Module) -> None:
    """Noise for every parameter, around one for norms."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else 0.3 * noise + (parameter.shape[0] == 16))


def called(theirs: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Output of diffusers' model for our inputs."""
    ids = inputs["positions"][0].float()
    return theirs(
        hidden_states=inputs["image"],
        encoder_hidden_states=inputs["text"],
        pooled_projections=inputs["pooled"],
        timestep=inputs["times"],
        img_ids=ids[TEXT_TOKENS:],
        txt_ids=ids[:TEXT_TOKENS],
        guidance=inputs.get("guidance"),
        return_dict=False,
    )[0]


def to_theirs(config: Config, ours: Mapping[str, Tensor], form: CheckpointFormat) -> dict[str, Tensor]:
    """Tensors of another tool, from ours by name, such as weights or gradients."""
    row_map = state_dict_map(config, form)
    found = {name: torch.empty(shape) for name, shape in row_map.their_shapes.items()}
    for name, runs in row_map.runs.items():
        order = row_map.columns.get(name)
        tensor = (
            ours[name]
            if order is None
            else torch.empty_like(ours[name]).index_copy_(1, torch.tensor(order), ours[name])
        )
        for run in runs:
            found[run.name][run.theirs] = tensor[run.ours]
    return found


def from_theirs(config: Config, theirs: Mapping[str, Tensor], form: CheckpointFormat) -> dict[str, Tensor]:
    """Our tensors, from those of another tool by name."""
    row_map = state_dict_map(config, form)
    found = {name: torch.empty(shape) for name, shape in row_map.shapes.items()}
    for name, runs in row_map.runs.items():
        for run in runs:
            found[name][run.ours] = theirs[run.name][run.theirs]
        if (order := row_map.columns.get(name)) is not None:
            found[name] = found[name][:, list(order)]
    return found
