"""Checkpoint writing: files with checksums, written completely or not at all."""

import json
import multiprocessing
import os
import pickle
import zlib
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.checkpoint.storage_reader import SafeStorageReader, damaged_checkpoint
from titan_exp.config.checkpoint_files import CHECKSUMS_FILE, METADATA_FILE, FileChecksum, parse_checksums
from titan_exp.config.foreign_file import read_file
from titan_exp.parallel.mesh import gather_objects
from titan_exp.tracking.run_folder.files import mkdir_below, write_atomically

PIECE_BYTES = 2**26
"""Bytes of rows held in memory beside the target, at least one row. Memory of this size returns to the system at once
when freed."""


def read_saved(file: IO[bytes], starts: Sequence[int], target: torch.Tensor) -> None:
    """Copy a window of the file's only tensor, with `target`'s shape and beginning at `starts`; runs no code of the
    file. Raises EOFError if the file is cut off, ValueError if its tensor is smaller, and what torch.load raises if it
    is damaged."""
    with FakeTensorMode():
        saved = torch.load(file, weights_only=True)
    ends = [start + size for start, size in zip(starts, target.shape, strict=True)]
    if saved.dim() != target.dim() or any(end > size for end, size in zip(ends, saved.shape, strict=True)):
        raise ValueError(f"the metadata lists a part of shape {list(saved.shape)} up to {ends}")
    if not saved.dim() or not saved.is_contiguous():
        file.seek(0)
        target.copy_(narrow_tensor_by_index(torch.load(file, weights_only=True), starts, target.shape))
        return
    row = saved[0].numel()
    begin = saved.untyped_storage()._checkpoint_offset + (saved.storage_offset() + starts[0] * row) * saved.itemsize
    file.seek(begin)
    if target.dtype == saved.dtype and target.shape[1:] == saved.shape[1:] and target.is_contiguous():
        _fill(file, target)
        return
    for rows in target.split(max(1, PIECE_BYTES // max(1, row * saved.itemsize))):
        piece = torch.empty((len(rows), *saved.shape[1:]), dtype=saved.dtype)
        _fill(file, piece)
        rows.copy_(narrow_tensor_by_index(piece, [0, *starts[1:]], rows.shape))


def _fill(file: IO[bytes], tensor: torch.Tensor) -> None:
    content = tensor.view(-1).view(torch.uint8).numpy().data
    while content:
        count = file.readinto(content)  # type: ignore[attr-defined]
        if not count:
            raise EOFError("one of its tensors is cut off")
        content = content[count:]


_CHUNK_BYTES = 8 * 2**20
_THREADS = 4


def has_checksums(path: Path) -> bool:
    """True if a checkpoint has checksums; early versions wrote none."""
    return (path / CHECKSUMS_FILE).exists()


def find_damage(path: Path, shard: int = 0, shards: int = 1) -> str | None:
    """Verify a checkpoint's files; returns a description of the first damaged file, or None. Only files with index
    `shard` modulo `shards` are read, so that ranks can read different files."""
    try:
        if not has_checksums(path):
            if any(has_checksums(neighbour) for neighbour in path.parent.glob("step-*")):
                return f"{CHECKSUMS_FILE} is missing, which other checkpoints beside it have"
            return _find_short_file(path) if shard == 0 else None
        checksums = parse_checksums(read_file(path / CHECKSUMS_FILE))
    except Exception as error:  # damaged bytes break JSON and pickles in any way
        return f"cannot read its metadata ({type(error).__name__}: {error})"
    if METADATA_FILE not in checksums:
        return f"{CHECKSUMS_FILE} does not list {METADATA_FILE}"
    names = sorted(checksums)[shard::shards]
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda name: find_file_damage(path / name, checksums[name]), names)
        return next((damage for damage in found if damage is not None), None)


def find_damage_on_ranks(path: Path, group: dist.ProcessGroup | None) -> str | None:
    """`find_damage` with the files sharded over the ranks of the group; without a group, by this process alone."""
    if not dist.is_initialized():
        return find_damage(path)
    found = gather_objects(find_damage(path, dist.get_rank(group), dist.get_world_size(group)), group)
    return next((damage for damage in found if damage is not None), None)


def require_intact(path: Path, group: dist.ProcessGroup | None = None) -> None:
    """Verify a checkpoint that you name; collective over the group. Raises UserError if it is damaged."""
    raise_if_damaged(path, find_damage_on_ranks(path, group))


def raise_if_damaged(path: Path, damage: str | None) -> None:
    """Raise UserError if `damage` is not None."""
    if damage is not None:
        raise damaged_checkpoint(path, damage)


def find_file_damage(path: Path, expected: FileChecksum) -> str | None:
    """Verify one file; returns a description of the damage, or None."""
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path.name} has {size:,} bytes instead of {expected.size:,}"
        crc, buffer = 0, memoryview(bytearray(_CHUNK_BYTES))
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                crc = zlib.crc32(buffer[:count], crc)
        return None if crc == expected.crc32 else f"{path.name} does not match its checksum"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"cannot read {path.name} ({error.strerror or error})"


def _find_short_file(path: Path) -> str | None:
    """Find a file shorter than its extents in the metadata, for checkpoints without checksums."""
    ends: dict[str, int] = {}
    for entry in SafeStorageReader(path).read_metadata().storage_data.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, end in sorted(ends.items()):
        file = path / name
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size < end:
            return f"{name} has {file.stat().st_size:,} bytes instead of {end:,}"
    return None


class ChecksumWriter(filesystem.FileSystemWriter):
    """torch's file system writer with a final `checksums.json`; writes one file per rank or per tensor."""

    def __init__(self, path: Path, *, single_file_per_rank: bool) -> None:
        super().__init__(path, single_file_per_rank=single_file_per_rank, sync_files=True)
        self.fs = self._recording = _RecordingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[Any]]:
        """Write this rank's files; rank 0 receives their checksums with torch's own results."""
        try:
            results = super().write_data(plan, planner).value()
        except RuntimeError as error:
            # torch.save hides an OSError such as a full disk.
            if self._recording.failure is not None:
                raise self._recording.failure from error
            raise
        done: torch.futures.Future[list[Any]] = torch.futures.Future()
        done.set_result([*results, *self._recording.checksums.items()])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write metadata and checksums (rank 0, after all ranks have written)."""
        written = [result for rank in results for result in rank if not isinstance(result, tuple)]
        metadata.storage_data = {result.index: result.storage_data for result in written}
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        path = Path(self.path) / METADATA_FILE
        temporary = path.with_name(f"{METADATA_FILE}.tmp")
        with self.fs.create_stream(temporary, "wb") as stream:
            _MetadataPickler(stream, protocol=4).dump(metadata)
            os.fsync(stream.fileno())
        self.fs.rename(temporary, path)
        checksums: dict[str, FileChecksum] = {}
        for rank in results:
            checksums |= dict(result for result in rank if isinstance(result, tuple))
        checksums |= self._recording.checksums
        files = {name: {"size": one.size, "crc32": f"{one.crc32:08x}"} for name, one in sorted(checksums.items())}
        write_atomically(Path(self.path) / CHECKSUMS_FILE, json.dumps({"files": files}, indent=1) + "\n")


class _MetadataPickler(pickle.Pickler):
    """Writes the same bytes under every Python. Up to 3.11.3, pickle names enum members by `getattr`; since 3.13, path
    classes have another module; since 3.14, the default protocol differs."""

    def reducer_override(self, value: Any) -> Any:
        return (type(value), (value.value,)) if isinstance(value, Enum) else NotImplemented


class PublishingWriter(ChecksumWriter):
    """Writes the checkpoint of a step into the run's folder and publishes it once durable."""

    def __init__(self, folder: CheckpointFolder, step: int) -> None:
        super().__init__(folder.partial_path(step), single_file_per_rank=True)
        self._recording.root = folder.path.parent
        self._folder, self._step = folder, step

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write metadata and checksums, then publish (rank 0, after all ranks have written)."""
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            # A save process that outlives its rank must not interfere with the next attempt.
            raise OSError("the trainer that requested this checkpoint is gone")
        super().finish(metadata, results)
        self._folder.publish(self._step)


class _RecordingFileSystem(filesystem.FileSystem):
    def __init__(self) -> None:
        self.checksums: dict[str, FileChecksum] = {}
        self.failure: OSError | None = None
        """First OSError while writing."""
        self.root: Path | None = None
        """Folder that is never created, because a deleted run folder must stay deleted."""

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        if self.root is None:
            super().mkdir(path)
        else:
            mkdir_below(self.root, Path(path))

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any]:
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            recording = _RecordingStream(cast(IO[bytes], stream))
            try:
                yield recording
            finally:
                self.failure = self.failure or recording.failure
            self.checksums[Path(path).name] = FileChecksum(recording.size, recording.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        if (recorded := self.checksums.pop(Path(path).name, None)) is not None:
            self.checksums[Path(new_path).name] = recorded


class _RecordingStream:
    """Sequentially written file with a running checksum."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.size = self.crc32 = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size += view.nbytes
        try:
            return self._stream.write(view)
        except OSError as error:
            self.failure = error
            raise

    def tell(self) -> int:
        return self._stream.tell()

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()
