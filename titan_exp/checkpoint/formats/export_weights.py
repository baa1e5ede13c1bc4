"""Writing weights in any format, a tensor at a time, into a place that appears only when all of it is there."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titan_exp.checkpoint.formats.dcp_checkpoint import write_dcp
from titan_exp.checkpoint.formats.mapping import ExportReader
from titan_exp.checkpoint.formats.open_checkpoint import TORCHTUNE_FILE, OpenCheckpoint
from titan_exp.checkpoint.formats.safetensors import TensorProducer, TensorSpec, write_safetensors
from titan_exp.checkpoint.formats.torch_file import write_torch_file
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.model import ModelConfig
from titan_exp.data.tokenizers.files import write_tokenizer
from titan_exp.models.convert.hf_config import generation_config, to_huggingface
from titan_exp.models.convert.llama_state_dict import CheckpointFormat, llama_map
from titan_exp.models.convert.meta_params import to_params
from titan_exp.models.convert.model_json import FILE, to_json

ROOM_FOR_THE_REST = 64 * 2**20
"""Bytes that configuration, tokenizer and the file system's own books take at most."""


@dataclass(frozen=True)
class ExportOptions:
    """How weights are written."""

    format: str
    """One of `source.FORMATS`."""
    dtype: torch.dtype | None = None
    """Type of all weights; None keeps each as it is."""
    file_bytes: float = 5e9
    """Size of a safetensors file; a larger tensor is alone in its own."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """Called with bytes written and bytes in all."""


def export_weights(source: OpenCheckpoint, target: Path, export: ExportOptions) -> int:
    """Write the weights of a source to a new place; returns how many bytes of weights.

    In memory at a time are the tensor that is written and the one or ones that it is made of: never the model.

    Raises:
        UserError: the target exists, the disk has no room, or the format cannot hold the model.
    """
    if target.exists():
        raise UserError(f"{target} exists. Name another place, or remove it first.")
    dialect = _DIALECTS.get(export.format)
    if dialect is not None and source.model.architecture != "decoder":
        raise UserError(
            f"format={export.format} holds Llama-like models, and this one is {source.model.architecture}. "
            "format=torch and format=dcp hold any model."
        )
    specs, produce = _tensors(source, dialect, export.dtype)
    total = sum(spec.bytes for spec in specs)
    written = 0

    def counted(spec: TensorSpec) -> Tensor:
        nonlocal written
        tensor = produce(spec)
        written += spec.bytes
        export.progress(written, total)
        return tensor

    with _appearing(target, total) as partial:
        _WRITERS[export.format](partial, source, specs, counted, export)
    return total


def _tensors(
    source: OpenCheckpoint, dialect: CheckpointFormat | None, dtype: torch.dtype | None
) -> tuple[list[TensorSpec], TensorProducer]:
    """What is to be written, in order, and what makes each."""
    if dialect is None:
        reader = source.parameters
        shapes = source.parameters.shapes
    else:
        row_map = llama_map(source.model, dialect)
        reader, shapes = ExportReader(source.parameters, row_map), row_map.their_shapes
    specs = [TensorSpec(name, tuple(shape), _type(reader.dtype(name), dtype)) for name, shape in shapes.items()]
    return specs, lambda spec: reader.read(spec.name).to(spec.dtype)


def _type(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def write_hf_metadata(
    folder: Path, model: ModelConfig, dtype: torch.dtype, tokenizer: str | None, special_tokens: Mapping[str, Any]
) -> None:
    """Put what stands beside weights into a Hugging Face folder: configuration and tokenizer."""
    named = str(dtype).removeprefix("torch.")
    _json(folder / "config.json", to_huggingface(model, dtype=named, special_tokens=special_tokens))
    _json(folder / "generation_config.json", generation_config(special_tokens))
    if tokenizer is not None:
        end_of_text = _end_of_text(tokenizer, special_tokens)
        write_tokenizer(tokenizer, folder, end_of_text=end_of_text, context=model.context)


def _huggingface(
    folder: Path, source: OpenCheckpoint, specs: Sequence[TensorSpec], produce: TensorProducer, export: ExportOptions
) -> None:
    folder.mkdir()
    write_hf_metadata(folder, source.model, specs[0].dtype, source.tokenizer, source.special_tokens)
    write_safetensors(folder, specs, produce, file_bytes=export.file_bytes)


def _llama(
    folder: Path, source: OpenCheckpoint, specs: Sequence[TensorSpec], produce: TensorProducer, export: ExportOptions
) -> None:
    folder.mkdir()
    _json(folder / "params.json", to_params(source.model))
    _json(folder / FILE, to_json(source.model, source.special_tokens))
    _tokenizer(folder, source)
    write_torch_file(folder / "consolidated.00.pth", {spec.name: spec for spec in specs}, produce)


def _torchtune(
    folder: Path, source: OpenCheckpoint, specs: Sequence[TensorSpec], produce: TensorProducer, export: ExportOptions
) -> None:
    folder.mkdir()
    _json(folder / FILE, to_json(source.model, source.special_tokens))
    _tokenizer(folder, source)
    write_torch_file(folder / TORCHTUNE_FILE, {spec.name: spec for spec in specs}, produce)


def _torch(
    path: Path, source: OpenCheckpoint, specs: Sequence[TensorSpec], produce: TensorProducer, export: ExportOptions
) -> None:
    config = to_json(source.model, source.special_tokens)
    write_torch_file(path, {"model": {spec.name: spec for spec in specs}, "config": _plain(config)}, produce)


def _distributed(
    folder: Path, source: OpenCheckpoint, specs: Sequence[TensorSpec], produce: TensorProducer, export: ExportOptions
) -> None:
    write_dcp(folder, specs, produce)
    _json(folder / FILE, to_json(source.model, source.special_tokens))
    _tokenizer(folder, source)


_DIALECTS: dict[str, CheckpointFormat] = {"huggingface": "huggingface", "llama": "llama", "torchtune": "torchtune"}
_WRITERS = {
    "huggingface": _huggingface,
    "llama": _llama,
    "torchtune": _torchtune,
    "torch": _torch,
    "dcp": _distributed,
}


def _tokenizer(folder: Path, source: OpenCheckpoint) -> None:
    if source.tokenizer is None:
        return
    end_of_text = _end_of_text(source.tokenizer, source.special_tokens)
    write_tokenizer(source.tokenizer, folder, end_of_text=end_of_text, context=source.model.context)


def _end_of_text(tokenizer: str, special_tokens: Mapping[str, Any]) -> str | None:
    """The name of the token that ends a text, where a tokenizer.json knows its number."""
    import tokenizers

    from titan_exp.rules.data import tokenizer_file

    number = special_tokens.get("eos_token_id")
    file = tokenizer_file(tokenizer)
    if tokenizer == "bytes" or not isinstance(number, int) or not file.is_file():
        return None
    return tokenizers.Tokenizer.from_file(str(file)).id_to_token(number)


def _json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _plain(values: object) -> object:
    return json.loads(json.dumps(values))


@contextmanager
def _appearing(target: Path, size: int) -> Iterator[Path]:
    """A place beside the target that becomes it at the end, and is removed where the writing fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < size + ROOM_FOR_THE_REST:
        raise UserError(
            f"{target.parent} has {free / 1e9:.1f} GB free, and the weights take {size / 1e9:.1f} GB. "
            "Another place, or dtype=bf16 for half of fp32."
        )
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    _remove(partial)
    try:
        yield partial
        os.rename(partial, target)
    except BaseException as error:
        _remove(partial)
        if _full(error):
            raise UserError(f"The disk of {target.parent} is full; nothing was left there.") from error
        raise


def _full(error: BaseException) -> bool:
    """Whether a failure is that of a full disk."""
    if isinstance(error, dcp.CheckpointException):
        return any(_full(failure[0]) for failure in error.failures.values())
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
