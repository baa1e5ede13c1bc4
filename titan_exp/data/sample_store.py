"""Store of samples in a folder. Its shards are written whole or not at all, and read through memory maps."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from titan_exp.config.data_files import MANIFEST, UNFINISHED, Field, StoreManifest
from titan_exp.config.errors.explained_errors import REMEDIES
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.foreign_file import read_object

TEMPORARY_SUFFIX = ".part"  # suffix of a file during writing
_BUFFER_BYTES = 1 << 20
_MAX_MAPPED_SHARDS = 256


def _checksum() -> Any:
    """New hasher for a store's files, about 1 GB/s."""
    return hashlib.blake2b(digest_size=16)


def file_checksum(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, _checksum).hexdigest()


class AtomicFile:
    """File under a temporary name; `commit` syncs and renames it, `close` before that deletes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A process whose parent was killed may briefly write the same file.
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
        self._file = self._temporary.open("wb", buffering=_BUFFER_BYTES)
        self._digest = _checksum()

    def write(self, content: bytes | memoryview) -> None:
        """Append bytes and update the checksum."""
        self._digest.update(content)
        self._file.write(content)

    def commit(self) -> str:
        """Sync the file and rename it; returns its checksum."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._path)
        return self._digest.hexdigest()

    def close(self) -> None:
        """Delete the temporary file."""
        self._temporary.unlink(missing_ok=True)
        with suppress(OSError):  # closing flushes the buffer, which fails again on a full disk
            self._file.close()


def write_json(path: Path, values: Any) -> str:
    """Write `values` as JSON, atomically; returns the checksum."""
    with closing(AtomicFile(path)) as file:
        file.write(json.dumps(values, indent=1).encode() + b"\n")
        return file.commit()


class ShardWriter:
    """Writes the files of a shard; `close` before `commit` deletes them. Fields without a header may grow."""

    def __init__(self, folder: Path, name: str, fields: Sequence[Field]) -> None:
        self._folder, self._name = folder, name
        self._dtypes = {each.name: np.dtype(each.dtype) for each in fields}
        self._files = {each.name: AtomicFile(folder / f"{name}.{each.name}") for each in fields}
        self.lengths = dict.fromkeys(self._files, 0)
        """Number of values along the first axis, by field."""
        for each in fields:
            if each.size is None:
                header = {"descr": each.dtype, "fortran_order": False, "shape": each.shape}
                np.lib.format.write_array_header_1_0(self._files[each.name], header)

    def add(self, field: str, values: np.ndarray) -> None:
        """Append values to a field."""
        self._files[field].write(np.ascontiguousarray(values, self._dtypes[field]).data)
        self.lengths[field] += len(values)

    def commit(self, numbers: Mapping[str, int], checksums: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Commit all files; returns the shard's manifest entry, with the checksums of its other files."""
        found = {**(checksums or {}), **{name: file.commit() for name, file in self._files.items()}}
        _sync_folder(self._folder)
        return {"name": self._name, **numbers, "checksums": found}

    def close(self) -> None:
        """Delete the temporary files."""
        for file in self._files.values():
            file.close()


@dataclass(frozen=True)
class StoreWriter:
    """Builds a store in a folder. Its journal lists the complete shards, so that the same command can resume."""

    manifest: type[StoreManifest]
    folder: Path
    out: str  # folder as typed, for error messages
    settings: Mapping[str, Any]  # settings that determine its content; JSON-serializable
    begun: str  # name of the journal's file with the settings
    keys: Mapping[str, str] = field(default_factory=dict)  # configuration keys of settings; others are options
    former: Mapping[str, Any] = field(default_factory=dict)  # values of settings that older stores did not record

    @property
    def journal(self) -> Path:
        """Folder of the journal."""
        return self.folder / UNFINISHED

    @property
    def _described(self) -> dict[str, Any]:
        return {**self.manifest.format(), **self.settings}

    def is_finished(self) -> bool:
        """True if the folder holds the complete store. Raises UserError if it holds anything else."""
        check_folder(self.folder, self.out)
        if not (self.folder / MANIFEST).exists():
            return False
        self._check_same(self.folder / MANIFEST)
        shutil.rmtree(self.journal, ignore_errors=True)
        return True

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the store's lock, which the operating system releases when this process exits; also removes partial
        files of killed processes. Raises UserError if another process holds the lock, or the store was begun with other
        settings."""
        self.journal.mkdir(parents=True, exist_ok=True)
        with (self.journal / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                reason = f"another titan-exp {self.manifest.verb} is building this store"
                raise _refusal(self.out, reason, "wait for it to end, or stop it") from None
            if (self.journal / self.begun).exists():
                self._check_same(self.journal / self.begun)
            else:
                write_json(self.journal / self.begun, self._described)
            self._remove_temporary_files()
            try:
                yield
            finally:
                self._remove_temporary_files()

    def finish(self, splits: Mapping[str, Any], identity: Any, **entries: Any) -> None:
        """Write the manifest, with the fingerprint of `identity`, and remove the journal."""
        digest = _checksum()
        digest.update(json.dumps(identity, sort_keys=True).encode())
        entries = {"fingerprint": digest.hexdigest(), **entries, "splits": splits}
        write_json(self.folder / MANIFEST, {**self._described, **entries})
        _sync_folder(self.folder)
        shutil.rmtree(self.journal, ignore_errors=True)

    def _remove_temporary_files(self) -> None:
        for path in (*self.folder.glob(f"*{TEMPORARY_SUFFIX}"), *self.journal.glob(f"*{TEMPORARY_SUFFIX}")):
            path.unlink(missing_ok=True)

    def _check_same(self, path: Path) -> None:
        try:
            saved = {**self.manifest.format(), **self.former, **read_object(path)}
        except UserError as error:
            raise _refusal(self.out, str(error), "remove the folder") from error
        violations = [
            Violation(
                self.keys.get(key, key),
                "",
                f"{self.out} began with {key} {before}, and you typed {now}",
                "choose another out, type the setting of before, or remove the folder",
            )
            for key, before, now in _differing(saved, self._described)
        ]
        if violations:
            raise UserError("The folder holds a store with other settings.", violations)


def _differing(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Settings whose values differ, before and now; entries of `options` have their own names."""
    for key, now in settings.items():
        if key == "options" and isinstance(saved.get(key), dict):
            yield from _differing(saved[key], now)
        elif saved.get(key) != now:
            yield key, saved.get(key), now


def check_folder(folder: Path, out: str) -> None:
    """Check that the folder is new, empty, or holds a store."""
    if folder.exists() and not folder.is_dir():
        raise _refusal(out, "there is a file of this name", "choose another out")
    is_store = any((folder / name).exists() for name in (MANIFEST, UNFINISHED))
    if folder.is_dir() and any(folder.iterdir()) and not is_store:
        raise _refusal(out, "the folder holds other files", "name a new folder")


def _refusal(out: str, reason: str, remedy: str) -> UserError:
    return UserError("Cannot build the store.", [Violation("out", out, reason, remedy)])


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems refuse to sync a folder
    finally:
        os.close(descriptor)


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Convert an OSError while writing a store into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "Free some space and type the same command to continue (it keeps the finished shards)"
            raise UserError(f"The disk of {folder} is full. {remedy}, or remove the folder.") from error
        begun = (folder / UNFINISHED).is_dir()
        stays = f" To continue, type the same command: it keeps the finished shards in {folder}." if begun else ""
        remedy = f" {REMEDIES[error.errno]}." if error.errno in REMEDIES else ""
        reason = error.strerror or error
        raise UserError(f"{error.filename or type(error).__name__}: {reason}.{remedy}{stays}") from error


class StoreSplit:
    """Shards of a split, in order; their files are memory-mapped on first use."""

    def __init__(self, manifest: StoreManifest, split: str) -> None:
        self.manifest, self.shards = manifest, manifest.splits[split]
        self.offsets = [0, *accumulate(shard.numbers[manifest.numbers[0]] for shard in self.shards)]
        """First item of each shard, followed by the number of items."""
        self.map = lru_cache(maxsize=_MAX_MAPPED_SHARDS)(self._map)

    def __len__(self) -> int:
        return self.offsets[-1]

    def shard_of(self, item: int) -> int:
        """Index of the shard of an item."""
        return bisect_right(self.offsets, item) - 1

    def _map(self, index: int) -> list[np.ndarray]:
        shard = self.shards[index]
        return [map_field(self.manifest, shard.name, each) for each in self.manifest.fields(shard)]


def map_field(manifest: StoreManifest, name: str, field: Field) -> np.ndarray:
    """Map the array of a field. Raises UserError if its file is damaged."""
    path = manifest.path / f"{name}.{field.name}"
    # Check sizes first: reading a map beyond the end of its file raises SIGBUS.
    if not (problem := field.problem(path)):
        try:
            array = np.load(path, "r") if field.size is None else np.memmap(path, field.dtype, "r", shape=field.shape)
            return array.view(np.ndarray)  # slicing is three times as fast
        except (OSError, ValueError, EOFError) as error:
            problem = str(error)
    remedy = manifest.repair.format(folder=manifest.path)
    violation = Violation("data.paths", str(manifest.path), f"{path.name}: {problem}", remedy)
    raise UserError(f"The {manifest.store} is damaged.", [violation])


_MAX_LISTED = 5


def require_intact(manifest: StoreManifest, folder: str) -> None:
    """Compare every file of a store with its checksum. Raises UserError that names the damaged ones."""
    found = list(find_damage(manifest))
    if found:
        lines = [f"{name}: {problem}" for name, problem in found[:_MAX_LISTED]]
        more = [f"and {len(found) - _MAX_LISTED} more"] if len(found) > _MAX_LISTED else []
        damage, verb = "\n  ".join([*lines, *more]), manifest.verb
        raise UserError(f"{folder} is damaged.\n  {damage}\n  Copy it again, or remove the folder and {verb} again.")


def find_damage(manifest: StoreManifest) -> Iterator[tuple[str, str]]:
    """Damaged files of a store and their problems; reads the whole store."""
    missing = dict(manifest.damaged())
    yield from missing.items()
    expected = dict(manifest.files)
    for shard in chain(*manifest.splits.values()):
        expected |= {f"{shard.name}.{ending}": value for ending, value in shard.checksums.items()}
    present = [name for name in expected if name not in missing]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda name: file_checksum(manifest.path / name), present)
        for name, checksum in zip(present, found, strict=True):
            if checksum != expected[name]:
                yield name, "the content of this file has changed"
