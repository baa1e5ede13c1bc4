"""A run's weights as Hugging Face folders, written by all ranks at once, each writing the part that it holds.

Where every tensor of theirs stands in the files is known beforehand, so that rank 0 lays the files out and each rank
writes its rows to their places: nothing is sent, and a rank has one of its own parameters in memory a second time.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_exp.checkpoint.formats.export_weights import write_hf_metadata
from titan_exp.checkpoint.formats.open_checkpoint import run_tokenizer
from titan_exp.checkpoint.formats.safetensors import (
    TensorLocation,
    TensorSpec,
    preallocate_safetensors,
    tensor_locations,
)
from titan_exp.checkpoint.state_dict import MODEL_PREFIX, model_state_dict
from titan_exp.config.groups.experiment import Experiment
from titan_exp.models.convert.llama_state_dict import llama_map
from titan_exp.models.convert.state_dict_map import StateDictMap
from titan_exp.parallel.mesh import Mesh
from titan_exp.parallel.meta_init import local, local_shard
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.atomic_write import sync_folder

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""What `checkpoint.export` may be."""
FILE_BYTES = 5e9
"""Size of a file; a larger tensor is alone in its own."""


class ShardedHFExporter:
    """The exports of one run; `write` is called by all ranks together.

    Args:
        experiment: the run.
        path: the run's `export/` folder.
        mesh: over which its parameters are spread.
        file_bytes: size of a file.
    """

    def __init__(self, experiment: Experiment, path: Path, mesh: Mesh, *, file_bytes: float = FILE_BYTES) -> None:
        self._experiment, self._path, self._mesh, self._file_bytes = experiment, path, mesh, file_bytes
        self._config = experiment.checkpoint
        self._leader = dist.get_rank() == 0
        if self._leader:
            for rubble in path.glob("*.partial"):
                shutil.rmtree(rubble, ignore_errors=True)

    def due(self, step: int) -> bool:
        """Whether an export is asked for after this step, be it the last or not."""
        every = self._config.export_every
        return self._config.export != "none" and every is not None and step % every == 0

    def path_of(self, step: int) -> Path:
        """The folder of a step; it is there only when it is complete."""
        return self._path / f"step-{step:08d}"

    def write(self, step: int, parts: Sequence[nn.Module]) -> bool:
        """Export the weights after a step, once; returns whether what is asked for is there.

        A failure (a full disk) is reported, and leaves nothing.

        Args:
            step: whose weights these are.
            parts: the model, or its parts on this rank.
        """
        target = self.path_of(step)
        if self._config.export == "none" or self._is_there(target):
            return True
        partial = target.with_name(f"{target.name}.partial")
        row_map, dtype = llama_map(self._experiment.model, "huggingface"), DTYPES[self._config.export]
        specs = [TensorSpec(name, tuple(shape), dtype) for name, shape in row_map.their_shapes.items()]
        written = (
            self._could(lambda: self._lay_out(partial, specs, dtype) if self._leader else None)
            and self._could(lambda: self._fill(partial, specs, row_map, dtype, parts))
            and self._could(lambda: self._publish(partial, target) if self._leader else None)
        )
        if written:
            get_logger().info("exported step %d: %s", step, target)
        elif self._leader:
            shutil.rmtree(partial, ignore_errors=True)
        return written

    def _is_there(self, target: Path) -> bool:
        """Rank 0's word: another rank may look through a cache of its own."""
        found = [target.is_dir() if self._leader else None]
        dist.broadcast_object_list(found, src=0, group=self._mesh.cpu_group)
        return bool(found[0])

    def _lay_out(self, partial: Path, specs: Sequence[TensorSpec], dtype: torch.dtype) -> None:
        """All but the tensors."""
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tokenizer, special = run_tokenizer(self._experiment.data)
        write_hf_metadata(partial, self._experiment.model, dtype, tokenizer, special)
        preallocate_safetensors(partial, specs, file_bytes=self._file_bytes)

    def _fill(
        self,
        partial: Path,
        specs: Sequence[TensorSpec],
        row_map: StateDictMap,
        dtype: torch.dtype,
        parts: Sequence[nn.Module],
    ) -> None:
        """This rank's part of the tensors."""
        runs = _Runs(row_map, tensor_locations(specs, file_bytes=self._file_bytes), dtype)
        with _Files(partial) as files:
            for key, tensor in model_state_dict(parts).items():
                if is_first_replica(tensor, self._mesh):
                    runs.write(files, key.removeprefix(MODEL_PREFIX), tensor)

    def _publish(self, partial: Path, target: Path) -> None:
        for file in partial.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)

    def _could(self, action: Callable[[], None]) -> bool:
        """Do it on every rank; returns whether all could."""
        failure = None
        try:
            action()
        except OSError as error:
            failure = f"rank {dist.get_rank()}: {error}"
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, failure, group=self._mesh.cpu_group)
        failed = [each for each in said if each is not None]
        if failed:
            get_logger().error("the weights could not be exported: %s", failed[0])
        return not failed


def is_first_replica(tensor: Tensor, mesh: Mesh) -> bool:
    """Whether this rank is the first of those that hold the same part of a tensor.

    Of a tensor that several stages hold, it is so on each of them.
    """
    divided = set()
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        divided = {name for name, it in zip(names, tensor.placements, strict=True) if not it.is_replicate()}
    axes = {"dp_replicate", "fsdp", "tp"} - divided
    return all(mesh.sharding[axis].get_local_rank() == 0 for axis in axes)


class _Files:
    """Files open for writing at any place; what was written is on the disk after the block."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._open = folder, dict[str, int]()
        self._closing = ExitStack()

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._closing:
            if kind is None:
                for descriptor in self._open.values():
                    os.fsync(descriptor)

    def write(self, file: str, offset: int, data: memoryview) -> None:
        """All of `data` at an offset: a call may write less than it is given."""
        if file not in self._open:
            self._open[file] = os.open(self._folder / file, os.O_WRONLY)
            self._closing.callback(os.close, self._open[file])
        while data:
            count = os.pwrite(self._open[file], data, offset)
            data, offset = data[count:], offset + count


class _Runs:
    """Where rows of our parameters go."""

    def __init__(self, row_map: StateDictMap, where: Mapping[str, TensorLocation], dtype: torch.dtype) -> None:
        self._map, self._where, self._dtype = row_map, where, dtype

    def write(self, files: _Files, name: str, tensor: Tensor) -> None:
        """Write what this rank holds of a parameter."""
        part = local_shard(tensor)
        if 0 in part.size:
            return
        held = local(tensor).detach().to("cpu", self._dtype).reshape(part.size[0], -1).contiguous()
        width, columns, column = (part.shape[1], part.size[1], part.start[1]) if len(part.shape) > 1 else (1, 1, 0)
        data, item, first = held.view(torch.uint8).numpy(), self._dtype.itemsize, part.start[0]
        for run in self._map.of(name, first, first + part.size[0]):
            place, rows = self._where[run.name], data[run.start - first : run.start - first + run.rows]
            begin = place.begin + column * item
            if columns == width and run.step == 1:
                files.write(place.file, begin + run.first * width * item, rows.reshape(-1).data)
                continue
            for number, row in enumerate(rows):
                at = run.first + number * run.step
                files.write(place.file, begin + at * width * item, row.data)
