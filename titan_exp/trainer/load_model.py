"""Load a model with weights of any format, whole or this rank's shard, for inference."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint
from titan_exp.checkpoint.state_dict import is_training_state
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.machine.torch_features import HEAD_SIZES, MERGING, ON_CPU
from titan_exp.config.paths.checkpoint_files import step_of
from titan_exp.config.schema.typed_config import load_group
from titan_exp.data.tokenizers import ByteTokenizer, Tokenizer
from titan_exp.models.build import build_model, choose_attention_backend
from titan_exp.models.spec.lookup import model_spec, with_mtp_depth
from titan_exp.models.spec.rope import longest_sequence
from titan_exp.ops.attention.sdpa import runs_here
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.parallel.meta_init import buffer_places, init_buffers, local_shard, materialize_parameters
from titan_exp.tracking.run_folder.provenance_records import ancestors

Rows = Mapping[str, Sequence[slice]]
"""Row ranges of source parameters, by name, that this rank's parameters concatenate."""


@torch.no_grad()
def load_source(
    source: OpenCheckpoint,
    device: torch.device,
    *,
    seq_len: int,
    documents: bool = False,
    dtype: torch.dtype = torch.float32,
    divide: Callable[[nn.Module], Rows] | None = None,
    parts: bool = False,
) -> nn.Module:
    """Build the model of a source and read its weights tensor by tensor, or this rank's shards.

    `divide` shards the model on the meta device and returns the rows of sharded parameters that are no DTensors.
    `documents` and `parts` are as in `choose_attention_backend`. Modules of multi-token prediction are left out.
    """
    config = with_mtp_depth(source.model, 0)
    # The kernel used in training may not run here.
    spec = model_spec(source.model)
    trained_with = "auto" if spec is None else spec.attention_backend
    backend = choose_attention_backend(
        config,
        device,
        bf16=dtype == torch.bfloat16,
        seq_len=seq_len,
        documents=documents,
        parts=parts,
        auto=not _runs(trained_with, device, dtype, parts=parts),
    )
    build = partial(build_model, config, seq_len=seq_len, attention_backend=backend)
    with torch.device("meta"):
        model = build()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    rows = {} if divide is None else divide(model)
    init_buffers(buffer_places(model), materialize_parameters(model, device), build, seed=0)
    for name, tensor in model.state_dict().items():
        if name not in source.parameters.shapes:
            if is_training_state(name):
                continue
            raise UserError(f"{source.path} lacks {name}, a parameter of the model {source.model.name}.")
        if name in rows:
            tensor.copy_(torch.cat([source.parameters.read(name, row_range) for row_range in rows[name]]))
            continue
        part = local_shard(tensor)
        if 0 not in part.size:
            window = [slice(start, start + size) for start, size in zip(part.start, part.size, strict=True)]
            local_tensor(tensor).copy_(source.parameters.read(name, *window))
    return model.eval()


def _runs(backend: str, device: torch.device, dtype: torch.dtype, *, parts: bool = False) -> bool:
    """True if an attention kernel runs on this device with weights of this dtype, and on `parts` of a sequence."""
    if parts and backend not in MERGING:
        return False
    if device.type == "cpu":
        return backend in ON_CPU
    # Kernels with limits of the head size compute in low precision only.
    return runs_here(backend, device) and (dtype != torch.float32 or backend not in HEAD_SIZES)


def tokenizer_of(source: OpenCheckpoint) -> Tokenizer:
    """Tokenizer of a source.

    Raises:
        UserError: the model reads no tokens, or the source has no tokenizer, or it cannot be read.
    """
    if not source.model.vocab_size:
        raise UserError(f"{source.path}: {source.model.name} reads no tokens, and is no language model.")
    if source.tokenizer == "bytes":
        return ByteTokenizer()
    if source.tokenizer is None:
        raise UserError(
            f"{source.path} has no tokenizer beside its weights. Put its tokenizer.json there, or give a run folder."
        )
    from titan_exp.data.tokenizers import HuggingFaceTokenizer

    return HuggingFaceTokenizer(source.tokenizer)


def training_length(path: Path, source: OpenCheckpoint) -> int:
    """Sequence length in tokens of the run that trained the weights; the longest of the model if unknown."""
    for folder in (path, path.parent.parent):
        if source.format == "dcp" and (folder / "config.yaml").is_file():
            return load_group(folder / "config.yaml", "training", imports=()).seq_len
    return longest_sequence(source.model)


def describe(path: Path, source: OpenCheckpoint) -> str:
    """One-line description of a source; of a run with those from which it was continued."""
    step = step_of(source.path)
    if source.format != "dcp" or step is None:
        return str(source.path)
    run = path if path != source.path else path.parent.parent
    parents = "".join(f", continued from {ancestor.lineage}" for ancestor in ancestors(run))
    averaged = ", averaged weights" if source.averaged else ""
    return f"{source.model.name}{averaged} after step {step} of {run}{parents}"
