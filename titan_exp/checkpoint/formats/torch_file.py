"""Files of torch: of torch.save, Meta's consolidated ones, and DCP checkpoints one tensor at a time by one process."""

import mmap
import os
import pickle
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from titan_exp.checkpoint import storage_reader
from titan_exp.checkpoint.formats.mapping import require_size
from titan_exp.checkpoint.formats.safetensors import TensorProducer, TensorSpec, window_extent
from titan_exp.checkpoint.load_state import MODEL_PREFIX
from titan_exp.checkpoint.optimizer_state import average_key, is_average
from titan_exp.checkpoint.storage_writer import ChecksumWriter, read_saved
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import read_object
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.models.convert.decoder_state_dict import META
from titan_exp.models.convert.state_dict_map import state_dict_map
from titan_exp.models.llama import from_params


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
        problem = "holds more than tensors and plain values, and loading it could execute code"
        raise UserError(f"{path} {problem}. Save only its state_dict() again.") from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        if path.is_file() and not zipfile.is_zipfile(path):
            raise UserError(f"{path} is not a file of torch.save, or is cut off.") from error
        raise UserError(f"Cannot read {path} as a torch file: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__} instead of a dictionary of tensors.")
    return found


def write_torch_file(path: Path, state: Mapping[str, Any], produce: TensorProducer) -> None:
    """Write nested dictionaries of plain values and `TensorSpec`s for `torch.load(..., weights_only=True)`. The file is
    laid out first and filled through a memory map, holding one tensor, or some of its rows, in memory. The archive's
    checksums stay empty; torch does not read them."""
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
    """Copy the dictionaries with blank tensors; `specs` collects the keys of each tensor."""
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


IGNORED = "rope.freqs"  # RoPE table in old files, which is not read


class ConsolidatedReader:
    """Reads tensors sharded over files by rows, by columns, or replicated. `pieces` are the tensors of each file in
    rank order, `shapes` the full shapes by name."""

    def __init__(self, pieces: list[dict[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._pieces = pieces
        present = {name for piece in pieces for name in piece if name != IGNORED}
        self.shapes = {name: self._whole_shape(name, shapes.get(name)) for name in sorted(present)}

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._pieces[0][name].dtype

    def read(self, name: str, *window: slice) -> Tensor:
        """Read a slice; a column-sharded tensor is concatenated first."""
        pieces, dim = self._shards(name, self.shapes[name])
        if len(pieces) == 1:
            return pieces[0][window]
        (first, *_), (rows, *_) = window_extent(self.shapes[name], window)
        columns = window[1:]
        if dim == 1:
            return torch.cat([piece[first : first + rows] for piece in pieces], dim=1)[:, *columns]
        last = first + rows
        found, start = [], 0
        for piece in pieces:
            low, high = max(first - start, 0), min(last - start, len(piece))
            if low < high:
                found.append(piece[low:high, *columns])
            start += len(piece)
        return torch.cat(found)

    def _shards(self, name: str, shape: tuple[int, ...]) -> tuple[list[Tensor], int]:
        pieces = [piece[name] for piece in self._pieces]
        if tuple(pieces[0].shape) == shape:
            return pieces[:1], 0
        dim = 0 if pieces[0].shape[1:] == torch.Size(shape[1:]) else 1
        # With more ranks than KV heads, adjacent ranks hold replicas.
        wanted = shape[dim] // pieces[0].shape[dim]
        return pieces[:: max(1, len(pieces) // max(1, wanted))], dim

    def _whole_shape(self, name: str, wanted: tuple[int, ...] | None) -> tuple[int, ...]:
        shape = tuple(self._pieces[0][name].shape) if name in self._pieces[0] else ()
        if wanted is None or len(shape) != len(wanted):
            return shape
        pieces, dim = self._shards(name, wanted)
        if shape == wanted:
            return shape
        return tuple(sum(piece.shape[dim] for piece in pieces) if at == dim else n for at, n in enumerate(shape))


def open_consolidated(folder: Path, known: ModelConfig | None = None) -> tuple[ModelConfig, ConsolidatedReader]:
    """Open a folder with `params.json` and `consolidated.*.pth`; returns its model configuration and tensors. `known`
    replaces the configuration of `params.json`. Raises UserError if a file is missing or damaged, or the files do not
    belong together."""
    params = read_object(folder / "params.json")
    files = sorted(folder.glob("consolidated.*.pth"))
    numbers = [file.name.split(".")[1] for file in files]
    if numbers != [f"{number:02d}" for number in range(len(files))]:
        raise UserError(f"{folder} holds {', '.join(file.name for file in files)}: a file between them is missing.")
    pieces = [torch_load_safely(file) for file in files]
    embedding, head = META.parts["embedding.weight"], META.parts["head.weight"]
    gate = META.layer.format(0) + META.parts["feed_forward.gate"]
    for file, piece in zip(files, pieces, strict=True):
        missing = [name for name in (embedding, gate) if name not in piece]
        if missing:
            raise UserError(f"{file} contains no {' and no '.join(missing)}: it is not a file of Meta's Llama.")
    first = pieces[0]
    vocab_size = first[embedding].shape[0]
    if len(pieces) > 1 and first[embedding].shape[1] == params.get("dim"):
        vocab_size *= len(pieces)
    config = known or from_params(
        params,
        folder.absolute().name,
        vocab_size=vocab_size,
        ffn_dim=first[gate].shape[0] * len(pieces),
        tied=head not in first or all(_equal(piece[embedding], piece[head]) for piece in pieces),
    )
    require_size(config, (tensor.shape for piece in pieces for tensor in piece.values()), str(folder))
    return config, ConsolidatedReader(pieces, state_dict_map(config, "llama").their_shapes)


def _equal(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are equal; compares chunks of rows until the first difference."""
    if one.shape != other.shape:
        return False
    return all(torch.equal(*pair) for pair in zip(one.split(1024), other.split(1024), strict=True))


CHUNK_BYTES = 2**28
"""Bytes per chunk of a larger tensor, at least one row or expert; a reader holds one chunk at a time."""


class DCPTensorReader:
    """Reader of a training checkpoint's model tensors by full name. A slice reads its rows of overlapping shards. With
    `averaged`, trained parameters are read as their averages; buffers and frozen parameters have none."""

    def __init__(self, path: Path, *, averaged: bool = False) -> None:
        self._path, self._averaged = path, averaged
        self._metadata = storage_reader.SafeStorageReader(path).read_metadata()
        self.shapes = {name: tuple(entry.size) for name, entry in self._entries.items()}
        entries = self._entries.items()
        sizes = {key: entry.size.numel() * entry.properties.dtype.itemsize for key, entry in entries}
        storage_reader.require_stored(path, sizes)

    @property
    def has_averages(self) -> bool:
        """True if the checkpoint holds averaged weights."""
        return any(map(is_average, self._metadata.state_dict_metadata))

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._entries[name].properties.dtype

    def read(self, name: str, *window: slice) -> Tensor:
        """Read a slice, in pieces; of overlapping saved shards only its rows."""
        starts, sizes = window_extent(self.shapes[name], window)
        tensor = torch.empty(sizes, dtype=self.dtype(name))
        if tensor.numel():
            reader = _RowReader(self._path, self._metadata)
            with _one_process():
                # No collectives: other ranks read other slices.
                state, planner = {self._key(name): tensor}, _SlicePlanner(tensor, starts)
                try:
                    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
                except dcp.CheckpointException as error:
                    raise storage_reader.unreadable_checkpoint(self._path, error) from error
        return tensor

    @cached_property
    def _entries(self) -> dict[str, TensorStorageMetadata]:
        entries = self._metadata.state_dict_metadata
        names = [key.removeprefix(MODEL_PREFIX) for key in entries if key.startswith(MODEL_PREFIX)]
        found = {name: entries[self._key(name)] for name in names}
        return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}

    def _key(self, name: str) -> str:
        average = average_key(name)
        has_average = self._averaged and average in self._metadata.state_dict_metadata
        return average if has_average else f"{MODEL_PREFIX}{name}"


def write_dcp(path: Path, specs: Sequence[TensorSpec], produce: TensorProducer) -> None:
    """Write a weights-only checkpoint, holding one tensor, or some of its rows or experts, in memory at a time."""
    named = {f"{MODEL_PREFIX}{spec.name}": spec for spec in specs}
    state = {key: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for key, spec in named.items()}
    # Each tensor or chunk gets a file, since torch holds the tensors of a file until it is written.
    writer = ChecksumWriter(path, single_file_per_rank=False)
    with _one_process():
        dcp.save(state, storage_writer=writer, planner=_LazySavePlanner(named, produce))


class _RowReader(storage_reader.SafeStorageReader):
    """Storage reader of rows of shards, with cached metadata, which is large and needed for every tensor."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._cached = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._cached

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill the planner's tensor row by row; torch's reader would hold each shard whole."""
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            with (Path(self.path) / place.relative_path).open("rb") as file:
                read_saved(self._slice_file(file, place), item.storage_offsets, planner.resolve_tensor(item))
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done


class _SlicePlanner(storage_reader.TensorLoadPlanner):
    def __init__(self, part: Tensor, starts: Sequence[int]) -> None:
        super().__init__()
        self._part, self._starts = part, torch.Size(starts)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "the planner is set up"
        (name,) = self.state_dict
        entry = self.metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata), "a tensor"
        part = [ChunkStorageMetadata(self._starts, self._part.shape)]
        plan = LoadPlan(create_read_items_for_chunk_list(name, entry, part))
        if storage_reader.check_read_items(plan.items, self.metadata)[name] != self._part.numel():
            raise storage_reader.MetadataError(f"the metadata does not list all of {name}")
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._part


class _LazySavePlanner(dcp.DefaultSavePlanner):
    """Save planner over meta tensors that produces each tensor, or chunk of one, when it is written."""

    def __init__(self, specs: dict[str, TensorSpec], produce: TensorProducer) -> None:
        super().__init__()
        self._specs, self._produce = specs, produce

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[chunk for item in plan.items for chunk in _chunks(item)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.tensor_data is not None, "weights are tensors"
        chunk = write_item.tensor_data.chunk
        spec = self._specs[write_item.index.fqn]
        if chunk.sizes == torch.Size(spec.shape):
            return self._produce(spec)
        return self._produce(spec, slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]))


def _chunks(item: WriteItem) -> Iterator[WriteItem]:
    """Chunks of consecutive rows or experts, the first dimension; small tensors whole."""
    data = item.tensor_data
    if data is None or len(data.size) < 2 or data.size.numel() * data.properties.dtype.itemsize <= CHUNK_BYTES:
        yield item
        return
    rows, *shape = data.size
    count = max(1, CHUNK_BYTES // (torch.Size(shape).numel() * data.properties.dtype.itemsize))
    for first in range(0, rows, count):
        offsets = torch.Size((first, *(0 for _ in shape)))
        chunk = ChunkStorageMetadata(offsets, torch.Size((min(count, rows - first), *shape)))
        index = MetadataIndex(item.index.fqn, chunk.offsets)
        yield replace(item, index=index, type=WriteItemType.SHARD, tensor_data=replace(data, chunk=chunk))


def _one_process() -> warnings.catch_warnings:
    return warnings.catch_warnings(action="ignore", category=UserWarning)
