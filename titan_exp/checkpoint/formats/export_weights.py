"""Export of weights in any format, one tensor at a time, published by an atomic rename."""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed.checkpoint as dcp

from titan_exp.checkpoint.formats.mapping import ExportReader
from titan_exp.checkpoint.formats.open_checkpoint import TORCHTUNE_FILE, OpenCheckpoint
from titan_exp.checkpoint.formats.safetensors import TensorProducer, TensorSpec, write_safetensors
from titan_exp.checkpoint.formats.torch_file import write_dcp, write_torch_file
from titan_exp.checkpoint.load_state import is_training_state
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.data.tokenizers import write_tokenizer
from titan_exp.models.convert import hf_config
from titan_exp.models.convert.state_dict_map import CheckpointFormat, checkpoint_formats, state_dict_map
from titan_exp.models.llama import to_params
from titan_exp.models.spec.lookup import model_spec

DIFFUSERS_STEM = "diffusion_pytorch_model"  # first part of the names of files that diffusers reads
METADATA_BYTES = 64 * 2**20  # upper bound on configuration, tokenizer and file-system metadata


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export."""

    format: str  # one of `open_checkpoint.FORMATS`
    dtype: torch.dtype | None = None  # dtype of all floating-point weights; None keeps their dtypes
    file_bytes: float = 5e9  # maximum size of a safetensors file; a larger tensor gets a separate file
    progress: Callable[[int, int], None] = lambda done, total: None  # called with bytes written and total bytes


def export_weights(source: OpenCheckpoint, target: Path, export: ExportOptions) -> int:
    """Write the weights of a checkpoint to a new path; returns the bytes of weights. Only the written tensor and its
    source tensors are in memory, never the model. Raises UserError if the target exists, the disk has no room, or the
    format does not support the model."""
    if target.exists():
        raise UserError(f"{target} exists. Use another path, or remove it first.")
    mapped_format = _MAPPED_FORMATS.get(export.format)
    if mapped_format is not None and mapped_format not in checkpoint_formats(source.model):
        raise UserError(
            f"format={export.format} has no names for the weights of model.architecture={source.model.architecture}. "
            "Use format=safetensors, torch or dcp, which hold any model under its own names."
        )
    violations = _INEXPRESSIBLE[export.format](source.model) if export.format in _INEXPRESSIBLE else []
    if violations:
        raise UserError(
            f"format={export.format} cannot express this model. "
            "Use format=safetensors, torch or dcp, which hold any model under its own names.",
            violations,
        )
    specs, produce = _tensors(source, mapped_format, export.dtype)
    total = sum(spec.bytes for spec in specs)
    written = 0

    def counted(spec: TensorSpec, *window: slice) -> torch.Tensor:
        nonlocal written
        tensor = produce(spec, *window)
        written += tensor.nbytes
        export.progress(written, total)
        return tensor

    with _published(target, total) as partial:
        _write(partial, source, specs, counted, export)
    return total


def _tensors(
    source: OpenCheckpoint, mapped_format: CheckpointFormat | None, dtype: torch.dtype | None
) -> tuple[list[TensorSpec], TensorProducer]:
    if mapped_format is None:
        reader, shapes = source.parameters, source.parameters.shapes
        spec = model_spec(source.model)
        buffers = {name for name in shapes if is_training_state(name) or (spec is not None and name in spec.buffers)}
    else:
        row_map = state_dict_map(source.model, mapped_format)
        reader, shapes = ExportReader(source.parameters, row_map), row_map.stored_shapes
        buffers = {name for name in shapes if row_map.is_buffer(name)}

    def export_dtype(name: str) -> torch.dtype:
        own = reader.dtype(name)
        # Biases that change in small steps would lose these in bf16.
        return own if dtype is None or name in buffers or not own.is_floating_point else dtype

    specs = [TensorSpec(name, tuple(shape), export_dtype(name)) for name, shape in shapes.items()]

    def produce(spec: TensorSpec, *window: slice) -> torch.Tensor:
        return reader.read(spec.name, *window).to(spec.dtype)

    return specs, produce


def write_hf_metadata(
    folder: Path, model: ModelConfig, dtype: torch.dtype, tokenizer: str | None, special_tokens: Mapping[str, Any]
) -> None:
    """Write config.json, generation_config.json and the tokenizer into a Hugging Face folder."""
    name = str(dtype).removeprefix("torch.")
    _json(folder / "config.json", hf_config.to_huggingface(model, dtype=name, special_tokens=special_tokens))
    _json(folder / "generation_config.json", hf_config.generation_config(special_tokens))
    _write_tokenizer(folder, model, tokenizer, special_tokens)


def _write(
    path: Path, source: OpenCheckpoint, specs: Sequence[TensorSpec], produce: TensorProducer, export: ExportOptions
) -> None:
    weights = {spec.name: spec for spec in specs}
    if export.format not in ("dcp", "torch"):
        path.mkdir()
    match export.format:
        case "huggingface":
            write_hf_metadata(path, source.model, specs[0].dtype, source.tokenizer, source.special_tokens)
            write_safetensors(path, specs, produce, file_bytes=export.file_bytes)
        case "safetensors":
            _write_description(path, source)
            write_safetensors(path, specs, produce, file_bytes=export.file_bytes)
        case "diffusers":
            _json(path / "config.json", hf_config.to_diffusers(source.model))
            write_safetensors(path, specs, produce, file_bytes=export.file_bytes, stem=DIFFUSERS_STEM)
        case "bfl":
            _write_description(path, source)
            write_safetensors(path, specs, produce, file_bytes=math.inf)
        case "llama":
            _json(path / "params.json", to_params(source.model))
            _write_description(path, source)
            write_torch_file(path / "consolidated.00.pth", weights, produce)
        case "torchtune":
            _write_description(path, source)
            write_torch_file(path / TORCHTUNE_FILE, weights, produce)
        case "dcp":
            write_dcp(path, specs, produce)
            _write_description(path, source)
        case _:
            config = json.loads(json.dumps(hf_config.to_json(source.model, source.special_tokens)))
            write_torch_file(path, {"model": weights, "config": config}, produce)


_INEXPRESSIBLE = {"huggingface": hf_config.export_violations, "diffusers": hf_config.diffusers_violations}
"""Function, by format, that lists values that the format's `config.json` cannot express."""

_MAPPED_FORMATS: dict[str, CheckpointFormat] = {name: name for name in get_args(CheckpointFormat)}


def _write_description(folder: Path, source: OpenCheckpoint) -> None:
    _json(folder / hf_config.FILE, hf_config.to_json(source.model, source.special_tokens))
    _write_tokenizer(folder, source.model, source.tokenizer, source.special_tokens)


def _write_tokenizer(
    folder: Path, model: ModelConfig, tokenizer: str | None, special_tokens: Mapping[str, Any]
) -> None:
    if tokenizer is not None:
        end_of_text = _end_of_text(tokenizer, special_tokens)
        write_tokenizer(tokenizer, folder, end_of_text=end_of_text, context=model.context)


def _end_of_text(tokenizer: str, special_tokens: Mapping[str, Any]) -> str | None:
    """Text of the end-of-text token, if its id is in tokenizer.json."""
    import tokenizers

    from titan_exp.rules.data import tokenizer_file

    number = special_tokens.get("eos_token_id")
    file = tokenizer_file(tokenizer)
    if tokenizer == "bytes" or not isinstance(number, int) or not file.is_file():
        return None
    return tokenizers.Tokenizer.from_file(str(file)).id_to_token(number)


def _json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _published(target: Path, size: int) -> Iterator[Path]:
    """Temporary path next to the target, renamed to it on success and removed on failure."""
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < size + METADATA_BYTES:
        shortage = f"{target.parent} has {free / 1e9:.1f} GB free, and the weights take {size / 1e9:.1f} GB"
        raise UserError(f"{shortage}. Use another disk, or dtype=bf16 for half of fp32.")
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    _remove(partial)
    try:
        yield partial
        os.rename(partial, target)
    except BaseException as error:
        _remove(partial)
        if _is_disk_full(error):
            raise UserError(f"The disk of {target.parent} is full, so we have removed the partial export.") from error
        raise


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, dcp.CheckpointException):
        return any(_is_disk_full(failure[0]) for failure in error.failures.values())
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
