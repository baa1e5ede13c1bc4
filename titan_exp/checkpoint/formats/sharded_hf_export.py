"""Sharded Hugging Face export: all ranks write their own shards of the weights in parallel.

All tensor locations are known in advance: rank 0 preallocates the files and each rank writes its rows at their
offsets. No tensor is communicated, and a rank holds one extra copy of one parameter.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_exp.checkpoint.formats import safetensors
from titan_exp.checkpoint.formats.export_weights import write_hf_metadata
from titan_exp.checkpoint.formats.open_checkpoint import run_tokenizer
from titan_exp.checkpoint.load_state import MODEL_PREFIX, is_training_state, model_state_dict
from titan_exp.config.checkpoint_files import step_name
from titan_exp.config.groups.experiment import ModelConfig
from titan_exp.config.groups.run import CheckpointConfig, DataConfig
from titan_exp.models.blocks.linear import ShardSpec
from titan_exp.models.convert.state_dict_map import RowRange, StateDictMap, state_dict_map
from titan_exp.models.spec.lookup import model_spec
from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.mesh import Mesh, from_rank_0, gather_objects
from titan_exp.parallel.meta_init import local_shard
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.files import mkdir_below, sync_all, sync_folder

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FILE_BYTES = 5e9  # maximum size of a file; a larger tensor gets a separate file


class ShardedHFExporter:
    """Exporter of a run into its `export/` folder `path`; `write` is collective over all ranks."""

    def __init__(
        self,
        config: CheckpointConfig,
        model: ModelConfig,
        data: DataConfig,
        path: Path,
        mesh: Mesh,
        *,
        file_bytes: float = FILE_BYTES,
    ) -> None:
        self._config, self._model, self._data = config, model, data
        self._path, self._mesh, self._file_bytes = path, mesh, file_bytes
        self._leader = dist.get_rank() == 0
        if self._leader:
            for stale in path.glob("*.partial"):
                shutil.rmtree(stale, ignore_errors=True)

    def due(self, step: int) -> bool:
        """True if `export_every` requires an export after this step."""
        every = self._config.export_every
        return self._config.export != "none" and every is not None and step % every == 0

    def path_of(self, step: int) -> Path:
        """Export folder of a step; exists only once complete."""
        return self._path / step_name(step)

    def write(self, step: int, parts: Sequence[nn.Module]) -> bool:
        """Export the weights after a step, unless already exported; returns True if the export exists or is turned off.
        A failure (disk full) is logged and leaves no files. `parts` is the model, or its parts on this rank."""
        target = self.path_of(step)
        # Other ranks than rank 0 may see a stale file-system cache.
        if self._config.export == "none" or from_rank_0(self._leader and target.is_dir(), self._mesh.cpu_group):
            return True
        partial = target.with_name(f"{target.name}.partial")
        row_map, dtype = state_dict_map(self._model, "huggingface"), DTYPES[self._config.export]
        specs = [
            safetensors.TensorSpec(name, tuple(shape), torch.float32 if row_map.is_buffer(name) else dtype)
            for name, shape in row_map.stored_shapes.items()
        ]
        # Bytes of all tensors that only one pipeline stage has.
        total = sum(spec.bytes for spec in specs if not self._is_shared(row_map.owner(spec.name)))

        def publish() -> None:
            sync_all(partial)
            os.rename(partial, target)
            sync_folder(target.parent)

        written = (
            self._all_succeed(lambda: self._preallocate(partial, specs, dtype) if self._leader else None)
            and self._all_succeed(lambda: self._write_shards(partial, specs, row_map, parts), total)
            and self._all_succeed(lambda: publish() if self._leader else None)
        )
        if written:
            get_logger().info("exported step %d: %s", step, target)
        else:
            # Every rank waits for the removal: the first rank that fails ends the others.
            self._all_succeed(lambda: shutil.rmtree(partial, ignore_errors=True) if self._leader else None)
        return written

    def _preallocate(self, partial: Path, specs: Sequence[safetensors.TensorSpec], dtype: torch.dtype) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        mkdir_below(partial.parents[1], partial)
        tokenizer, special = run_tokenizer(self._data)
        write_hf_metadata(partial, self._model, dtype, tokenizer, special)
        safetensors.preallocate_safetensors(partial, specs, file_bytes=self._file_bytes)

    def _write_shards(
        self, partial: Path, specs: Sequence[safetensors.TensorSpec], row_map: StateDictMap, parts: Sequence[nn.Module]
    ) -> int:
        """Write this rank's shards; returns their bytes, without tensors that several pipeline stages have."""
        writer, written = _RowWriter(row_map, safetensors.tensor_locations(specs, file_bytes=self._file_bytes)), 0
        with _OffsetFiles(partial) as files:
            for key, tensor in model_state_dict(parts).items():
                name = key.removeprefix(MODEL_PREFIX)
                if not is_training_state(name) and is_first_replica(tensor, self._mesh):
                    count = writer.write(files, name, tensor)
                    written += 0 if self._is_shared(name) else count
        return written

    def _is_shared(self, name: str) -> bool:
        spec = model_spec(self._model)
        return spec is not None and name.partition(".")[0] in spec.pipeline.copied

    def _all_succeed(self, action: Callable[[], int | None], total: int | None = None) -> bool:
        """Run an action on every rank; True if all succeeded and, given a total, their results add up to it."""
        failure, result = None, None
        try:
            result = action()
        except OSError as error:
            failure = f"rank {dist.get_rank()}: {error}"
        found = gather_objects((failure, result), self._mesh.cpu_group)
        failed = [failure for failure, _ in found if failure is not None]
        # Files are preallocated, so rows that no rank writes would be zeros.
        if not failed and total is not None and (written := sum(count or 0 for _, count in found)) != total:
            failed = [f"ranks wrote {written} bytes of {total}: the layout's shards do not cover each weight once"]
        if failed:
            get_logger().error("could not export the weights: %s", failed[0])
        return not failed


def is_first_replica(tensor: Tensor, mesh: Mesh) -> bool:
    """True if this rank holds the first replica of its shard of a tensor, on any mesh of this rank's pipeline stage. A
    tied tensor has a first replica on each of its pipeline stages."""
    ranks = mesh.sharding.mesh
    names = mesh.sharding.mesh_dim_names or ()
    first = int(ranks.select(names.index("pp"), mesh.sharding["pp"].get_local_rank()).min())
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == first
    # Meshes of equal shape partition the stage; one of them has the stage's first rank.
    if first not in tensor.device_mesh.mesh.flatten().tolist():
        return False
    position = tensor.device_mesh.get_coordinate()
    assert position is not None, "a rank holds shards of tensors on its own mesh"
    places = zip(position, tensor.placements, strict=True)
    return all(index == 0 for index, placement in places if placement.is_replicate())


class _OffsetFiles:
    """Files open for writes at any offset; they are synced at the end of the block."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._open = folder, dict[str, int]()
        self._closing = ExitStack()

    def __enter__(self) -> "_OffsetFiles":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._closing:
            if kind is None:
                for descriptor in self._open.values():
                    os.fsync(descriptor)

    def write(self, file: str, offset: int, data: memoryview) -> None:
        """Write all of `data` at an offset; a single pwrite may write less."""
        if file not in self._open:
            self._open[file] = os.open(self._folder / file, os.O_WRONLY)
            self._closing.callback(os.close, self._open[file])
        while data:
            count = os.pwrite(self._open[file], data, offset)
            data, offset = data[count:], offset + count


class _RowWriter:
    def __init__(self, row_map: StateDictMap, locations: Mapping[str, safetensors.TensorLocation]) -> None:
        self._map, self._locations = row_map, locations

    def write(self, files: _OffsetFiles, name: str, tensor: Tensor) -> int:
        """Write this rank's shard of a parameter, also into tensors that duplicate it; returns its bytes."""
        part = local_shard(tensor)
        if 0 in part.size:
            return 0
        inputs = _Inputs.of(part, stacked=name in self._map.stacked)
        dtype = self._location(self._map.their_names(name)[0])[0].spec.dtype
        held = local_tensor(tensor).detach().to("cpu", dtype).reshape(-1, inputs.size).contiguous()
        data, written, done = held.view(torch.uint8).numpy(), 0, 0
        for first, count in self._map.blocks(name, part.start, part.size):
            of_stacks: defaultdict[str, list[tuple[RowRange, np.ndarray]]] = defaultdict(list)
            for run in self._map.of(name, first, first + count):
                begin = done + run.start - first
                rows = data[begin : begin + run.rows]
                for their_name in (run.name, *self._map.copies_of(run.name)):
                    location, expert = self._location(their_name)
                    if expert is None:
                        self._write_rows(files, location, run, inputs, rows)
                    else:
                        of_stacks[their_name].append((run, rows))
                    written += rows.nbytes
            for their_name, runs in of_stacks.items():
                self._write_transposed(files, their_name, inputs, runs)
            done += count
        return written

    def _location(self, their_name: str) -> tuple[safetensors.TensorLocation, int | None]:
        """Location of the stored tensor that holds one of their tensors, and the index of the expert in it."""
        stored, expert = self._map.stored(their_name)
        return self._locations[stored], expert

    @staticmethod
    def _write_rows(
        files: _OffsetFiles, location: safetensors.TensorLocation, run: RowRange, inputs: "_Inputs", rows: np.ndarray
    ) -> None:
        item = location.spec.dtype.itemsize
        begin, stride = location.begin + inputs.start * item, inputs.whole * item
        if inputs.size == inputs.whole and run.step == 1:
            files.write(location.file, begin + run.first * stride, rows.reshape(-1).data)
            return
        for number, row in enumerate(rows):
            files.write(location.file, begin + (run.first + number * run.step) * stride, row.data)

    def _write_transposed(
        self, files: _OffsetFiles, name: str, inputs: "_Inputs", runs: Sequence[tuple[RowRange, np.ndarray]]
    ) -> None:
        """Write rows of an expert as columns of its matrix in a stored tensor [experts, in, out]."""
        location, expert = self._location(name)
        item, outputs = location.spec.dtype.itemsize, self._map.their_shapes[name][0]
        columns = np.concatenate([np.arange(run.rows) * run.step + run.first for run, _ in runs])
        rows = np.concatenate([rows for _, rows in runs]).reshape(len(columns), inputs.size, item)
        order = np.argsort(columns)
        columns, matrix = columns[order], np.ascontiguousarray(rows[order].transpose(1, 0, 2))
        begin = location.begin + (expert or 0) * inputs.whole * outputs * item
        if len(columns) == outputs:
            files.write(location.file, begin + inputs.start * outputs * item, matrix.reshape(-1).data)
            return
        ends = [*(np.flatnonzero(np.diff(columns) > 1) + 1).tolist(), len(columns)]
        for number, row in enumerate(matrix):
            of_row, first = begin + (inputs.start + number) * outputs * item, 0
            for end in ends:
                files.write(location.file, of_row + int(columns[first]) * item, row[first:end].reshape(-1).data)
                first = end


class _Inputs(NamedTuple):
    """Range of inputs in a shard of a weight; a vector has one input."""

    start: int
    size: int
    whole: int

    @staticmethod
    def of(part: ShardSpec, *, stacked: bool) -> "_Inputs":
        """Range of inputs in a shard; `stacked` parameters have an expert dim before the outputs."""
        has_inputs = len(part.shape) - stacked > 1
        return _Inputs(part.start[-1], part.size[-1], part.shape[-1]) if has_inputs else _Inputs(0, 1, 1)
