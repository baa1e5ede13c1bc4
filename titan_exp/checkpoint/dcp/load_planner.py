"""DCP load planner that reads only tensors, each with the expected shape and dtype.

A checkpoint's metadata is written by whoever made the checkpoint. torch's planner follows it: it unpickles an entry
that the metadata lists as bytes, and leaves a tensor as it is where chunks are missing.
"""

import io
from collections import Counter
from math import prod
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor


class MetadataError(Exception):
    """Metadata of a checkpoint is damaged, or does not describe the expected tensors."""


def check_metadata(metadata: Any) -> None:
    """Check the types of unpickled metadata. Raises MetadataError."""
    tables = (metadata.state_dict_metadata, metadata.storage_data) if isinstance(metadata, Metadata) else ()
    if not tables or not all(isinstance(table, dict) for table in tables):
        raise MetadataError("it is no metadata of a checkpoint")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            raise MetadataError(f"the entry {key!r} is no tensor")
        if isinstance(entry, TensorStorageMetadata) and not (
            isinstance(entry.size, torch.Size)
            and min(entry.size, default=0) >= 0
            and isinstance(getattr(entry.properties, "dtype", None), torch.dtype)
        ):
            raise MetadataError(f"the entry {key!r} has no shape, or no dtype")


def check_read_items(items: list[ReadItem], metadata: Metadata) -> Counter[str]:
    """Check planned reads against the metadata; returns the number of elements read, by key.

    Raises:
        MetadataError: an item is not a tensor, or is not in a file of the checkpoint.
    """
    read: Counter[str] = Counter()
    for item in items:
        key, place = item.dest_index.fqn, metadata.storage_data.get(item.storage_index)
        if item.type != LoadItemType.TENSOR:
            raise MetadataError(f"{key} is listed as bytes, not as a tensor")
        if place is None:
            raise MetadataError(f"a part of {key} is listed in no file")
        name = place.relative_path
        if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
            raise MetadataError(f"{key} is listed in {name!r}, which is no file of the checkpoint")
        if place.transform_descriptors:
            raise MetadataError(f"{key} is stored with the transforms {list(place.transform_descriptors)}")
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
                raise MetadataError(f"{read[key]:,} of {local.numel():,} elements of {key} are listed")
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse an entry of bytes."""
        raise MetadataError(f"{read_item.dest_index.fqn} is listed as bytes, not as a tensor")


def _check_entry(key: str, entry: Any, tensor: Tensor) -> None:
    if entry is None:
        raise MetadataError(f"{key} is not listed")
    if not isinstance(entry, TensorStorageMetadata):
        raise MetadataError(f"{key} is listed as {type(entry).__name__}, not as a tensor")
    if torch.Size(entry.size) != tensor.shape:
        raise MetadataError(f"{key} has the shape {list(entry.size)}, here {list(tensor.shape)}")
    dtype = entry.properties.dtype
    # Floating-point weights are converted: a bf16 export initializes an fp32 model.
    if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.is_floating_point()):
        raise MetadataError(f"{key} has the dtype {dtype}, here {tensor.dtype}")
