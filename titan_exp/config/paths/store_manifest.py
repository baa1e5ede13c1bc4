"""Manifest of a store: a folder of samples in shards, with the sizes and checksums of their files.

`manifest.json` is written last: a store that has it is complete. A split is a list of shards, and a shard has a file
for each field. Ragged samples, which differ in length, are two fields: the values of all, and where each begins.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.paths.foreign_file import count, digests, file_name, items, read_object, table, text

VERSION = 1
"""Version of the formats."""
MANIFEST = "manifest.json"
UNFINISHED = "unfinished"
"""Journal folder of an unfinished store."""
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Field:
    """Array of a shard, in a file of its own."""

    name: str
    """Ending of the file: `.npy` of NumPy, or another for numbers without a header."""
    dtype: str
    """Type of the numbers, as in NumPy (`<u2`)."""
    shape: tuple[int, ...]
    """Shape of the array."""

    @property
    def size(self) -> int | None:
        """Bytes of the file; None with a header."""
        return None if self.name.endswith(".npy") else math.prod(self.shape) * int(self.dtype[2:])

    def problem(self, file: Path) -> str:
        """Problem with the size of its file; empty if correct."""
        try:
            found = file.stat().st_size
        except OSError as error:
            return "this file is missing" if isinstance(error, FileNotFoundError) else str(error.strerror)
        return "" if self.size in (None, found) else f"this file has {found:,} bytes instead of {self.size:,}"


@dataclass(frozen=True)
class Shard:
    """Shard of a split."""

    name: str
    """Name of its files, without their endings."""
    numbers: Mapping[str, int]
    """Sizes, by name."""
    checksums: Mapping[str, str]
    """16-byte blake2b digest of each file, by its ending."""


@dataclass(frozen=True, kw_only=True)
class StoreManifest(ABC):
    """Manifest of a complete store."""

    store: ClassVar[str]
    """Kind of store, as in `token store`."""
    verb: ClassVar[str]
    """Verb that writes it."""
    example: ClassVar[str]
    """Sentence with a command that writes one into `{folder}`."""
    repair: ClassVar[str]
    """Remedy for a damaged store in `{folder}`."""
    numbers: ClassVar[tuple[str, ...]]
    """Names of a shard's numbers; the first counts its items."""
    path: Path
    """Folder of the store."""
    fingerprint: str
    """Checksum of the whole store."""
    splits: Mapping[str, Sequence[Shard]]
    """Shards of each split, in order."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the other files, by name."""

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read the manifest of the store in `folder`.

        Raises:
            UserError: there is none, or it is damaged or of another kind or version.
        """
        path, verb = Path(folder).expanduser(), f"titan-exp {cls.verb}"

        def refusal(reason: str, remedy: str) -> UserError:
            violation = Violation("data.paths", str(folder), reason, remedy)
            return UserError(f"Cannot use the {cls.store}.", [violation])

        try:
            if not path.is_dir():
                raise refusal("there is no such folder", cls.example.format(folder=folder))
            if not (path / MANIFEST).exists() and (path / UNFINISHED).is_dir():
                raise refusal("this store is not complete yet", f"finish it: run the same {verb} command again")
            if not (path / MANIFEST).exists():
                raise refusal(
                    f"this folder has no {MANIFEST}, so it is not a {cls.store}", f"give a folder that {verb} wrote"
                )
            values = read_object(path / MANIFEST)
        except OSError as error:  # a folder on the way is closed
            raise refusal(
                f"titan_exp cannot read its {MANIFEST}: {error}", "ask for the permission to read it"
            ) from error
        except UserError as error:
            if error.violations:
                raise
            raise refusal(str(error), "ask for the permission to read it, or make a new store") from error
        if values.get("format") != cls.format()["format"]:
            raise refusal(f"its {MANIFEST} is not that of a {cls.store}", f"give a folder that {verb} wrote")
        if (version := values.get("version")) != VERSION:
            reason = f"this store has format {version}, and this version of titan-exp reads format {VERSION}"
            raise refusal(reason, f"{cls.verb} again, or use the version of titan-exp that wrote it")
        try:
            own, splits = cls.parse(values), table(values.get("splits"), "splits")
            return cls(
                path=path,
                fingerprint=text(values.get("fingerprint"), "fingerprint"),
                splits={split: list(cls._shards(split, splits.get(split))) for split in SPLITS},
                **own,
            )
        except UserError as error:
            raise refusal(f"its {MANIFEST} is damaged: {error}", f"{cls.verb} into a new store") from error

    @classmethod
    def format(cls) -> dict[str, Any]:
        """First entries of the manifest."""
        return {"format": f"titan_exp {cls.store}", "version": VERSION}

    @classmethod
    @abstractmethod
    def parse(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a kind of store, of the manifest's values. Raises UserError about one of another type."""

    @classmethod
    def _shards(cls, split: str, values: object) -> Iterator[Shard]:
        name = f"of a shard of {split}"
        for shard in (table(one, f"a shard of {split}") for one in items(values, f"splits.{split}")):
            yield Shard(
                file_name(shard.get("name"), f"name {name}"),
                {number: count(shard.get(number), f"{number} {name}") for number in cls.numbers},
                digests(shard.get("checksums"), f"checksums {name}"),
            )

    @abstractmethod
    def fields(self, shard: Shard) -> Sequence[Field]:
        """Fields of a shard."""

    def total(self, number: str) -> dict[str, int]:
        """Sum of a number of the shards, by split."""
        return {split: sum(shard.numbers[number] for shard in shards) for split, shards in self.splits.items()}

    def arrays(self) -> Iterator[tuple[str, Field]]:
        """All fields of all shards, with the names of their files."""
        for shard in chain(*self.splits.values()):
            yield from ((f"{shard.name}.{each.name}", each) for each in self.fields(shard))

    def damaged(self) -> Iterator[tuple[str, str]]:
        """Files that are missing or have the wrong size, each with the problem; reads no file."""
        for name, each in self.arrays():
            if problem := each.problem(self.path / name):
                yield name, problem
        yield from ((name, "this file is missing") for name in self.files if not (self.path / name).is_file())
