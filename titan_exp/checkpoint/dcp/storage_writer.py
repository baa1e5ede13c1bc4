"""Writing a distributed checkpoint: its files, then the size and checksum of each of them, then its name.

Checksums are of what was meant to be written, taken on its way to the disk: no file is read again. Publishing is part
of the write, so that a failure of it is, as any other, the failure of the save on every rank.
"""

import multiprocessing
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import IO, Any, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from titan_exp.checkpoint.dcp.checksums import FileChecksum, write_checksums
from titan_exp.checkpoint.retention import CheckpointFolder


class ChecksumWriter(dcp.FileSystemWriter):
    """torch's file writer, which records what it writes, and writes the checksums last.

    Args:
        path: folder to write.
        single_file_per_rank: one file for each rank, else one for each tensor.
    """

    def __init__(self, path: Path, *, single_file_per_rank: bool) -> None:
        super().__init__(path, single_file_per_rank=single_file_per_rank, sync_files=True)
        self.fs = self._recording = _RecordingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Write this rank's files; what is recorded of them travels to rank 0 with torch's own results."""
        try:
            results = super().write_data(plan, planner).value()
        except RuntimeError as error:
            # torch.save says only that something went wrong, not that the disk is full.
            if self._recording.failure is not None:
                raise self._recording.failure from error
            raise
        done: Future[list[Any]] = Future()
        done.set_result([*results, *self._recording.sums.items()])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """On rank 0, after every rank has written: table of contents and checksums."""
        own = [[result for result in rank if not isinstance(result, tuple)] for rank in results]
        super().finish(metadata, own)
        sums: dict[str, FileChecksum] = {}
        for rank in results:
            sums |= dict(result for result in rank if isinstance(result, tuple))
        write_checksums(Path(self.path), sums | self._recording.sums)


class PublishingWriter(ChecksumWriter):
    """Writes a checkpoint of a run, and publishes it when all of it is on disk.

    Args:
        folder: the run's checkpoints.
        step: whose state is written.
    """

    def __init__(self, folder: CheckpointFolder, step: int) -> None:
        super().__init__(folder.partial_path(step), single_file_per_rank=True)
        self._folder, self._step = folder, step

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """On rank 0, after every rank has written: table of contents, checksums, publication."""
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            # A writing process that outlives its rank must not meddle with the next attempt.
            raise OSError("the trainer that asked for this checkpoint is gone")
        super().finish(metadata, results)
        self._folder.publish(self._step)


class _RecordingFileSystem(FileSystem):
    """Remembers size and checksum of every file that is written through it, by its name."""

    def __init__(self) -> None:
        self.sums: dict[str, FileChecksum] = {}
        self.failure: OSError | None = None
        """What the system said when a file could not be written."""

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Generator[Any]:
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            recording = _Recording(cast(IO[bytes], stream))
            try:
                yield recording
            finally:
                self.failure = self.failure or recording.failure
            self.sums[Path(path).name] = FileChecksum(recording.size, recording.crc32)

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        super().rename(path, new_path)
        if (recorded := self.sums.pop(Path(path).name, None)) is not None:
            self.sums[Path(new_path).name] = recorded


class _Recording:
    """A file open for writing from its beginning to its end."""

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
