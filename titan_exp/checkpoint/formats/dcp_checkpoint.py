"""DCP checkpoints, read and written one tensor at a time by one process."""

import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from titan_exp.checkpoint.dcp.load_planner import MetadataError, TensorLoadPlanner, check_read_items
from titan_exp.checkpoint.dcp.storage_reader import SafeStorageReader, unreadable_checkpoint
from titan_exp.checkpoint.dcp.storage_writer import ChecksumWriter
from titan_exp.checkpoint.formats.safetensors import TensorProducer, TensorSpec
from titan_exp.checkpoint.formats.tensor_reader import FULL_SLICE
from titan_exp.checkpoint.state_dict import MODEL_PREFIX


class DCPTensorReader:
    """Reader of a training checkpoint's model tensors by full name. A slice reads only overlapping saved shards."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata = SafeStorageReader(path).read_metadata()
        self.shapes = {name: tuple(entry.size) for name, entry in self._entries.items()}

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._entries[name].properties.dtype

    def read(self, name: str, rows: slice = FULL_SLICE, columns: slice = FULL_SLICE) -> Tensor:
        """Read a slice; overlapping saved shards are read whole, one at a time."""
        wanted = [range(*part.indices(size)) for part, size in zip((rows, columns), self.shapes[name], strict=False)]
        # A scalar has no dimension to slice.
        sizes = [*map(len, wanted), *self.shapes[name][len(wanted) :]]
        starts = [*(part.start for part in wanted), *[0] * (len(sizes) - len(wanted))]
        tensor = torch.empty(sizes, dtype=self.dtype(name))
        if tensor.numel():
            reader = _CachedMetadataReader(self._path, self._metadata)
            with _one_process():
                # Without collectives: other ranks read other slices.
                try:
                    dcp.load(
                        {f"{MODEL_PREFIX}{name}": tensor},
                        storage_reader=reader,
                        planner=_SlicePlanner(tensor, starts),
                        no_dist=True,
                    )
                except dcp.CheckpointException as error:
                    raise unreadable_checkpoint(self._path, error) from error
        return tensor

    @cached_property
    def _entries(self) -> dict[str, TensorStorageMetadata]:
        entries = self._metadata.state_dict_metadata.items()
        return {
            key.removeprefix(MODEL_PREFIX): entry
            for key, entry in entries
            if key.startswith(MODEL_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }


def write_dcp(path: Path, specs: Sequence[TensorSpec], produce: TensorProducer) -> None:
    """Write a weights-only checkpoint, with one tensor in memory at a time."""
    named = {f"{MODEL_PREFIX}{spec.name}": spec for spec in specs}
    state = {key: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for key, spec in named.items()}
    # One file per tensor: torch holds the tensors of a file until it is written.
    writer = ChecksumWriter(path, single_file_per_rank=False)
    with _one_process():
        dcp.save(state, storage_writer=writer, planner=_LazySavePlanner(named, produce))


class _CachedMetadataReader(SafeStorageReader):
    """Storage reader with cached metadata, which is large and needed for every tensor."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._cached = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._cached


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
            raise MetadataError(f"not all of {name} is listed")
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._part


class _LazySavePlanner(dcp.DefaultSavePlanner):
    """Save planner over meta tensors that produces each tensor when it is written."""

    def __init__(self, specs: dict[str, TensorSpec], produce: TensorProducer) -> None:
        super().__init__()
        self._specs, self._produce = specs, produce

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._produce(self._specs[write_item.index.fqn])


def _one_process() -> warnings.catch_warnings:
    """Suppress torch's warning that it assumes a single process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
