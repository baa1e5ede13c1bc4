"""DCP checkpoints, read and written one tensor at a time by one process."""

import warnings
from collections.abc import Iterator, Sequence
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
from torch.futures import Future

from titan_exp.checkpoint.dcp.storage_reader import (
    MetadataError,
    SafeStorageReader,
    TensorLoadPlanner,
    check_read_items,
    require_stored,
    unreadable_checkpoint,
)
from titan_exp.checkpoint.dcp.storage_writer import ChecksumWriter, read_saved
from titan_exp.checkpoint.formats.safetensors import TensorProducer, TensorSpec, window_extent
from titan_exp.checkpoint.optimizer_state import average_key, is_average
from titan_exp.checkpoint.state_dict import MODEL_PREFIX

CHUNK_BYTES = 2**28
"""Bytes per chunk of a larger tensor, at least one row or expert; a reader holds one chunk at a time."""


class DCPTensorReader:
    """Reader of a training checkpoint's model tensors by full name. A slice reads its rows of overlapping shards.

    With `averaged`, trained parameters are read as their averages; buffers and frozen parameters have none.
    """

    def __init__(self, path: Path, *, averaged: bool = False) -> None:
        self._path, self._averaged = path, averaged
        self._metadata = SafeStorageReader(path).read_metadata()
        self.shapes = {name: tuple(entry.size) for name, entry in self._entries.items()}
        entries = self._entries.items()
        require_stored(path, {key: entry.size.numel() * entry.properties.dtype.itemsize for key, entry in entries})

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
                try:
                    dcp.load(
                        {self._key(name): tensor},
                        storage_reader=reader,
                        planner=_SlicePlanner(tensor, starts),
                        no_dist=True,
                    )
                except dcp.CheckpointException as error:
                    raise unreadable_checkpoint(self._path, error) from error
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


class _RowReader(SafeStorageReader):
    """Storage reader of rows of shards, with cached metadata, which is large and needed for every tensor."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._cached = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._cached

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensor row by row; torch's reader would hold each shard whole."""
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            with (Path(self.path) / place.relative_path).open("rb") as file:
                read_saved(self._slice_file(file, place), item.storage_offsets, planner.resolve_tensor(item))
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _SlicePlanner(TensorLoadPlanner):
    """Load planner for a slice of the single requested tensor."""

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
        if check_read_items(plan.items, self.metadata)[name] != self._part.numel():
            raise MetadataError(f"the metadata does not list all of {name}")
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
    """Suppress torch's warning that it assumes a single process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
