"""Sharded load from a Hugging Face folder: each rank, in any layout, reads only its own shards."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from titan_exp.checkpoint.formats.open_checkpoint import open_huggingface
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.model import ModelConfig
from titan_exp.models.convert.state_dict_map import checkpoint_formats
from titan_exp.models.spec.lookup import mtp_depth
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.parallel.meta_init import local_shard
from titan_exp.rules.weights.given_weights import GivenWeights, require_fit


@torch.no_grad()
def load_hf_sharded(
    model: nn.Module,
    config: ModelConfig,
    folder: Path,
    exclude: Sequence[str] = (),
    accepted: Sequence[str] = (),
) -> None:
    """Load the weights of a Hugging Face folder into a model or a pipeline stage, without communication.

    The model's dtypes may differ from the files'; parameters whose full name matches `exclude` keep their values.
    Raises UserError if the folder cannot be read, or with its model at the keys of `config` that are not `accepted` the
    same weights would compute something else.
    """
    if "huggingface" not in checkpoint_formats(config):
        reason = "has no tensor names in Hugging Face's format"
        raise UserError(f"{folder}: model.architecture={config.architecture} {reason}.")
    source = open_huggingface(folder, config.architecture, mtp=mtp_depth(config) > 0)
    require_fit(config, GivenWeights(str(folder), source.model), exclude, accepted)
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in source.parameters.shapes)
    for name, tensor in (*model.named_parameters(), *buffers):
        if any(fnmatchcase(name, pattern) for pattern in exclude):
            continue
        part = local_shard(tensor)
        if 0 not in part.size:
            window = [slice(start, start + size) for start, size in zip(part.start, part.size, strict=True)]
            local_tensor(tensor).copy_(source.parameters.read(name, *window))
