"""DCP storage writer with checksums and atomic publication.

Checksums are computed from the written bytes, without reading files back. Publication is part of the write, so that a
failure of it fails the save on every rank.
"""

import multiprocessing
import os
import pickle
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import IO, Any, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from titan_exp.checkpoint.dcp.checksums import write_checksums
from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.config.paths.checkpoint_files import FileChecksum
from titan_exp.config.paths.checkpoint_paths import METADATA_FILE
from titan_exp.tracking.run_folder.atomic_write import mkdir_below


class ChecksumWriter(dcp.FileSystemWriter):
    """torch's file system writer with a final `checksums.json`; writes one file per rank or per tensor."""

    def __init__(self, path: Path, *, single_file_per_rank: bool) -> None:
        super().__init__(path, single_file_per_rank=single_file_per_rank, sync_files=True)
        self.fs = self._recording = _RecordingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Write this rank's files; rank 0 receives their checksums with torch's own results."""
        try:
            results = super().write_data(plan, planner).value()
        except RuntimeError as error:
            # torch.save hides an OSError such as a full disk.
            if self._recording.failure is not None:
                raise self._recording.failure from error
            raise
        done: Future[list[Any]] = Future()
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
        write_checksums(Path(self.path), checksums | self._recording.checksums)


class _MetadataPickler(pickle.Pickler):
    """Writes the same bytes under every Python: up to 3.11.3, pickle names members of an enum by `getattr`, since 3.13
    classes of paths have another module, and since 3.14 the default protocol is another."""

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


class _RecordingFileSystem(FileSystem):
    """Records size and checksum of every written file by name."""

    def __init__(self) -> None:
        self.checksums: dict[str, FileChecksum] = {}
        self.failure: OSError | None = None
        """First OSError while writing."""
        self.root: Path | None = None
        """Folder that is never created, such as a deleted run folder."""

    def mkdir(self, path: str | PathLike[str]) -> None:
        if self.root is None:
            super().mkdir(path)
        else:
            mkdir_below(self.root, Path(path))

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Generator[Any]:
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

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
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
