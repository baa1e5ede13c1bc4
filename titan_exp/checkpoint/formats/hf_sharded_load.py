"""Sharded load from a Hugging Face folder: each rank, in any layout, reads only its own shards."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from titan_exp.checkpoint.formats.open_checkpoint import open_huggingface
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.hydra.presets import NOT_THE_SHAPE, model_overrides
from titan_exp.parallel.meta_init import local, local_shard


@torch.no_grad()
def load_hf_sharded(model: nn.Module, config: ModelConfig, folder: Path, exclude: Sequence[str] = ()) -> None:
    """Load the weights of a Hugging Face folder into a model or a pipeline stage, without communication.

    Args:
        model: sharded or not; its dtypes may differ from those of the files.
        config: the model group that it was built from.
        folder: with `config.json` and safetensors.
        exclude: patterns of full names of parameters that keep their values.

    Raises:
        UserError: the folder cannot be read, or its model differs from `config`.
    """
    source = open_huggingface(folder)
    if config.architecture != "decoder":
        reason = "only the built-in decoder has names in Hugging Face's Llama"
        raise UserError(f"{folder}: {reason}, and model.architecture is {config.architecture}.")
    _check_shape(config, source.model, folder)
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in exclude):
            continue
        part = local_shard(parameter)
        if 0 not in part.size:
            window = [slice(start, start + size) for start, size in zip(part.start, part.size, strict=True)]
            local(parameter).copy_(source.parameters.read(name, *window))


def _check_shape(asked: ModelConfig, found: ModelConfig, folder: Path) -> None:
    differing = [
        Violation(
            f"model.{key}", value, f"the weights have {getattr(found, key)}", f"model.{key}={getattr(found, key)}"
        )
        for key, value in vars(asked).items()
        if key not in (*NOT_THE_SHAPE, "context", "norm_eps", "rope") and getattr(found, key) != value
    ]
    if differing:
        fitting = " ".join(model_overrides(found))
        raise UserError(f"The weights in {folder} are of another model. They fit: {fitting}", differing)
