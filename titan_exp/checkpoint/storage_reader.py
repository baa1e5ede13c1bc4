"""DCP storage reader that unpickles metadata with an allow-list, so that reading a checkpoint executes no code."""

import io
import pickle
import pickletools
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from titan_exp.config.checkpoint_files import METADATA_FILE
from titan_exp.config.errors.user_error import UserError


class MetadataError(Exception):
    """The metadata of a checkpoint is damaged, or does not describe the expected tensors."""


def check_metadata(metadata: Any) -> None:
    """Check the types of unpickled metadata. Raises MetadataError."""
    tables = (metadata.state_dict_metadata, metadata.storage_data) if isinstance(metadata, Metadata) else ()
    if not tables or not all(isinstance(table, dict) for table in tables):
        raise MetadataError("this is not the metadata of a checkpoint")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            raise MetadataError(f"the entry {key!r} is not a tensor")
        if isinstance(entry, TensorStorageMetadata) and not (
            isinstance(entry.size, torch.Size)
            and min(entry.size, default=0) >= 0
            and isinstance(getattr(entry.properties, "dtype", None), torch.dtype)
        ):
            raise MetadataError(f"the entry {key!r} has no shape, or no dtype")


def check_read_items(items: list[ReadItem], metadata: Metadata) -> Counter[str]:
    """Check planned reads against the metadata; returns the number of elements read, by key. Raises MetadataError if an
    item is not a tensor, or is not in a file of the checkpoint."""
    read: Counter[str] = Counter()
    for item in items:
        key, place = item.dest_index.fqn, metadata.storage_data.get(item.storage_index)
        if item.type != LoadItemType.TENSOR:
            raise MetadataError(f"the metadata lists {key} as bytes instead of a tensor")
        if place is None:
            raise MetadataError(f"the metadata names no file for a part of {key}")
        name = place.relative_path
        if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
            raise MetadataError(f"the metadata puts {key} into {name!r}, which is not a file of the checkpoint")
        if place.transform_descriptors:
            raise MetadataError(f"the checkpoint stores {key} with the transforms {list(place.transform_descriptors)}")
        read[key] += prod(item.lengths)
    return read


class TensorLoadPlanner(dcp.DefaultLoadPlanner):
    """Load planner for a flat state dict of tensors. Raises MetadataError where the metadata does not fit it."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of this rank's shards."""
        assert self.metadata is not None, "the planner is set up"
        for key, tensor in self.state_dict.items():
            _check_entry(key, self.metadata.state_dict_metadata.get(key), tensor)
        plan = super().create_local_plan()
        read = check_read_items(plan.items, self.metadata)
        for key, tensor in self.state_dict.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if read[key] != local.numel():
                raise MetadataError(f"the metadata lists {read[key]:,} of the {local.numel():,} elements of {key}")
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse an entry of bytes."""
        raise MetadataError(f"the metadata lists {read_item.dest_index.fqn} as bytes instead of a tensor")


def _check_entry(key: str, entry: Any, tensor: torch.Tensor) -> None:
    if entry is None:
        raise MetadataError(f"the metadata does not list {key}")
    if not isinstance(entry, TensorStorageMetadata):
        raise MetadataError(f"the metadata lists {key} as {type(entry).__name__} instead of a tensor")
    if torch.Size(entry.size) != tensor.shape:
        raise MetadataError(f"{key} has the shape {list(entry.size)} there and {list(tensor.shape)} here")
    dtype = entry.properties.dtype
    # Floating-point weights are converted: a bf16 export initializes an fp32 model.
    if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.is_floating_point()):
        raise MetadataError(f"{key} has the dtype {dtype} there and {tensor.dtype} here")


_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_CLASSES = ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta")
_ALLOWED_NAMES = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "_MEM_FORMAT_ENCODING", *_CLASSES)),
    (_FILESYSTEM, "_StorageInfo"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_device_mesh"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype | torch.memory_format):
            return getattr(torch, global_name)
        if module_name == "pathlib._local":  # the module name in Python 3.13
            module_name = "pathlib"
        if (module_name, global_name) == ("builtins", "getattr"):
            return _memory_format
        if (module_name, global_name) in _ALLOWED_NAMES:
            return super().find_class(module_name, global_name)
        asked = f"the checkpoint's metadata asks for {module_name}.{global_name}, which is not checkpoint metadata"
        raise pickle.UnpicklingError(f"{asked}, so the file is damaged or was tampered with")


def _memory_format(kind: Any, name: Any) -> Any:
    """Member of torch's memory-format enum, which Python 3.11.0 to 3.11.3 pickled as `getattr(enum, name)`."""
    if kind is not _MEM_FORMAT_ENCODING or not isinstance(name, str):
        raise pickle.UnpicklingError("the checkpoint's metadata asks for an attribute, so the file is damaged")
    return _MEM_FORMAT_ENCODING[name]


@lru_cache(maxsize=1)  # a load reads the same metadata several times
def _check_memo(content: bytes) -> None:
    """Refuse a pickle whose memo indices exceed its length. Unpickling allocates 16 bytes for every smaller index, and
    a flipped bit can make that tens of gigabytes. Raises ValueError."""
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name.endswith("PUT") and (argument or 0) > len(content):
            raise ValueError(f"{len(content)} bytes have an object of number {argument}")


class SafeStorageReader(dcp.FileSystemReader):
    """torch's file system reader with safe unpickling of the metadata."""

    failure: Exception | None = None  # error of the last read of metadata, which torch 2.11 drops

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata. Raises UserError on anything other than checkpoint metadata."""
        path = Path(self.path)
        try:
            content = (path / METADATA_FILE).read_bytes()
            _check_memo(content)
            metadata = _MetadataUnpickler(io.BytesIO(content)).load()
            check_metadata(metadata)
        except OSError as error:
            self.failure = error
            raise
        except Exception as error:  # damaged bytes break pickles in any way
            damage = f"cannot read {METADATA_FILE} ({type(error).__name__}: {error})"
            self.failure = damaged_checkpoint(path, damage)
            raise self.failure from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def damaged_checkpoint(path: Path, damage: str) -> UserError:
    """Make the error for a damaged checkpoint."""
    return UserError(f"The checkpoint {path} is damaged: {damage}. Use an older one, or another copy of it.")


def unreadable_checkpoint(path: Path, error: dcp.CheckpointException, dropped: Exception | None = None) -> UserError:
    """Error for a failed load, of the first failing rank or of this rank's error that torch dropped."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    cause = cause if dropped is None else dropped
    if isinstance(cause, UserError):
        return cause
    if isinstance(cause, OSError):
        return UserError(f"Rank {rank} cannot read the checkpoint {path}: {cause}")
    if isinstance(cause, MetadataError):
        return UserError(f"Cannot load the checkpoint {path}: {cause}. It is damaged, or belongs to another model.")
    return damaged_checkpoint(path, f"{type(cause).__name__}: {cause}")


def tensor_entries(path: Path) -> dict[str, TensorStorageMetadata]:
    """Metadata entry of every tensor in a checkpoint, by key."""
    entries = SafeStorageReader(path).read_metadata().state_dict_metadata
    return {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def tensor_shapes(path: Path) -> dict[str, torch.Size]:
    """Global shape of every tensor in a checkpoint, by key."""
    return {key: entry.size for key, entry in tensor_entries(path).items()}


def require_stored(path: Path, sizes: Mapping[str, int]) -> None:
    """Refuse tensors larger than the checkpoint's files, before memory is allocated for them. Raises UserError."""
    stored = sum(file.stat().st_size for file in path.iterdir())
    for key, size in sizes.items():
        if size > stored:
            damage = f"the metadata lists {key} with {size} bytes, and all files together have {stored}"
            raise damaged_checkpoint(path, damage)


def load_into(path: Path, state: dict[str, torch.Tensor]) -> None:
    """Load a checkpoint into tensors in place, in any layout; collective if a process group exists. Raises UserError:
    the checkpoint lacks a tensor, or has another shape or dtype, or cannot be read."""
    with warnings.catch_warnings():
        # Without a process group, torch warns that it assumes a single process.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader = SafeStorageReader(path)
        try:
            dcp.load(dict(state), storage_reader=reader, planner=TensorLoadPlanner())
        except dcp.CheckpointException as error:
            raise unreadable_checkpoint(path, error, reader.failure) from error
