"""torch file reader (memory-mapped) and writer (one tensor at a time)."""

import mmap
import os
import pickle
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_exp.checkpoint.formats.safetensors import TensorProducer, TensorSpec
from titan_exp.config.errors.user_error import UserError


class TorchFileReader:
    """Reads tensors of a dictionary from `torch_load_safely`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._tensors[name].dtype

    def read(self, name: str, *window: slice) -> Tensor:
        """Slice a tensor in the memory map."""
        return self._tensors[name][window]


def torch_load_safely(path: Path) -> dict[str, Any]:
    """Load a file with memory-mapped tensors, without executing its code. Raises UserError if it is not a torch file,
    is damaged, or contains more than tensors and plain values."""
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path} holds more than tensors and plain values, and loading it could execute code. Save only its "
            "state_dict() again."
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        if path.is_file() and not zipfile.is_zipfile(path):
            raise UserError(f"{path} is not a file written by torch.save, or is cut off.") from error
        raise UserError(f"{path} cannot be read as a torch file: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__}, not a dictionary of tensors.")
    return found


def write_torch_file(path: Path, state: Mapping[str, Any], produce: TensorProducer) -> None:
    """Write nested dictionaries of plain values and `TensorSpec`s for `torch.load(..., weights_only=True)`.

    The file is laid out first and filled through a memory map, with one tensor, or some rows of one, in memory. The
    archive's checksums stay empty; torch does not read them.
    """
    specs: list[tuple[tuple[str, ...], TensorSpec]] = []
    with tempfile.NamedTemporaryFile(dir=path.parent) as file:
        # A sparse file of the largest tensor's size backs every tensor, without memory or disk space.
        file.truncate(max(1, _largest(state)))
        with torch.serialization.skip_data():
            torch.save(_blank(state, file.name, (), specs), path)
    with path.open("r+b") as file:
        # Preallocate: a disk that fills up under a memory map would raise SIGBUS.
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        laid_out = torch.load(path, mmap=True, weights_only=True)
    for keys, spec in specs:
        target: Any = laid_out
        for key in keys:
            target = target[key]
        for window in spec.windows():
            target[window].copy_(produce(spec, *window))
    del laid_out
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def _largest(state: Mapping[str, Any]) -> int:
    sizes = [_largest(value) if isinstance(value, Mapping) else getattr(value, "bytes", 0) for value in state.values()]
    return max(sizes, default=0)


def _blank(
    state: Mapping[str, Any], backing_file: str, keys: tuple[str, ...], specs: list[tuple[tuple[str, ...], TensorSpec]]
) -> dict[str, Any]:
    """Copy of the dictionaries with blank tensors; `specs` collects the keys of each."""
    built: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            built[key] = _blank(value, backing_file, (*keys, key), specs)
        elif isinstance(value, TensorSpec):
            specs.append(((*keys, key), value))
            size = torch.Size(value.shape).numel()
            built[key] = torch.from_file(backing_file, shared=True, size=size, dtype=value.dtype).view(value.shape)
        else:
            built[key] = value
    return built
