"""Sharded load from a Hugging Face folder: each rank, in any layout, reads only its own shards."""

from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titan_exp.checkpoint.formats.open_checkpoint import open_huggingface
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.model import ModelConfig
from titan_exp.models.convert.checkpoint_formats import checkpoint_formats
from titan_exp.models.spec.lookup import model_spec, mtp_depth
from titan_exp.models.spec.model_spec import ModelSpec
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.parallel.meta_init import local_shard


@torch.no_grad()
def load_hf_sharded(model: nn.Module, config: ModelConfig, folder: Path, exclude: Sequence[str] = ()) -> None:
    """Load the weights of a Hugging Face folder into a model or a pipeline stage, without communication.

    The model's dtypes may differ from the files'; parameters whose full name matches `exclude` keep their values.
    Raises UserError if the folder cannot be read, or its model differs from `config`.
    """
    if "huggingface" not in checkpoint_formats(config):
        reason = "has no tensor names in Hugging Face's format"
        raise UserError(f"{folder}: model.architecture={config.architecture} {reason}.")
    source = open_huggingface(folder, config.architecture, mtp=mtp_depth(config) > 0)
    _check_shape(config, source.model, folder)
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in source.parameters.shapes)
    for name, tensor in (*model.named_parameters(), *buffers):
        if any(fnmatchcase(name, pattern) for pattern in exclude):
            continue
        part = local_shard(tensor)
        if 0 not in part.size:
            window = [slice(start, start + size) for start, size in zip(part.start, part.size, strict=True)]
            local_tensor(tensor).copy_(source.parameters.read(name, *window))


def _check_shape(config: ModelConfig, found: ModelConfig, folder: Path) -> None:
    wanted = model_spec(config)
    assert wanted is not None, "a family with tensor names has a spec"
    differing = [
        Violation(f"model.{key}", own, f"the weights have {other}", f"model.{key}={other}")
        for key, own, other in _differing_values(config, found)
        if _spec_with(config, key, other).weights != wanted.weights
    ]
    if differing:
        from titan_exp.config.hydra.presets import model_overrides

        fitting = " ".join(model_overrides(found))
        raise UserError(f"The weights in {folder} are of another model. They fit: {fitting}", differing)


def _differing_values(config: Any, found: Any) -> Iterator[tuple[str, object, object]]:
    """Dotted keys (`moe.experts`) at which two configs differ, with both values."""
    for key, own in vars(config).items():
        other = getattr(found, key)
        if is_dataclass(own) and type(own) is type(other):
            yield from ((f"{key}.{inner}", a, b) for inner, a, b in _differing_values(own, other))
        elif own != other:
            yield key, own, other


def _spec_with(config: ModelConfig, key: str, value: object) -> ModelSpec:
    spec = None if key == "architecture" else model_spec(_replaced(config, key, value))
    return spec or model_spec(config)  # type: ignore[return-value]  # a family with tensor names has a spec


def _replaced(config: Any, key: str, value: object) -> Any:
    """A config with another value at a dotted key."""
    first, _, rest = key.partition(".")
    return replace(config, **{first: _replaced(getattr(config, first), rest, value) if rest else value})
