"""Token store manifest: `manifest.json`, written last by `titan-exp tokenize`, so that a store with a manifest is
complete. Read by rules before a run and by the loaders, without numpy.

A store is a folder. A split (`train`, `validation`) is a list of shards; a shard is two files without headers:
NAME.tokens contains its tokens as little-endian unsigned integers of `token_bytes` bytes, each document followed by the
end-of-text token; NAME.documents contains the start of each document, in tokens from the shard's start, as
little-endian 64-bit integers. A document never spans shards. `tokenizer.json` is a copy, unless the tokenizer is built
in.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.config.paths.foreign_file import count, digests, file_name, items, read_object, table, text

FORMAT, VERSION = "titan_exp token store", 1
MANIFEST = "manifest.json"
UNFINISHED = "unfinished"
"""Journal folder of an unfinished store."""
BEGIN_BYTES = 8
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Shard:
    """Shard of a split: two files."""

    name: str
    """Name of the files, without their endings."""
    tokens: int
    """Number of tokens, including end-of-text tokens."""
    documents: int
    """Number of documents."""
    checksums: Mapping[str, str]
    """16-byte blake2b digest of each file, by extension (`tokens`, `documents`)."""


@dataclass(frozen=True)
class Manifest:
    """Manifest of a complete store."""

    path: Path
    """Folder of the store."""
    source: str
    """Fingerprint of the source text."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocab_size: int
    """Largest token id plus 1."""
    token_bytes: int
    """Bytes per token: 2 or 4."""
    fingerprint: str
    """Checksum of the whole store."""
    splits: Mapping[str, Sequence[Shard]]
    """Shards of each split, in source order."""
    files: Mapping[str, str]
    """Checksums of the other files, by name."""

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Number of tokens of each split."""
        return {split: sum(shard.tokens for shard in shards) for split, shards in self.splits.items()}

    @cached_property
    def documents(self) -> dict[str, int]:
        """Number of documents of each split."""
        return {split: sum(shard.documents for shard in shards) for split, shards in self.splits.items()}

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Names and sizes in bytes of all shards' files."""
        for shards in self.splits.values():
            for shard in shards:
                yield f"{shard.name}.tokens", shard.tokens * self.token_bytes
                yield f"{shard.name}.documents", shard.documents * BEGIN_BYTES

    def damaged(self) -> Iterator[tuple[str, str]]:
        """Files that are missing or have the wrong size, each with the problem; reads no file."""
        for name, size in self.sizes():
            problem = wrong_size(self.path / name, size)
            if problem:
                yield name, problem
        yield from ((name, "it is missing") for name in self.files if not (self.path / name).is_file())


def wrong_size(path: Path, size: int) -> str:
    """Problem with the size of a file; empty if correct."""
    try:
        found = path.stat().st_size
    except OSError as error:
        return "it is missing" if isinstance(error, FileNotFoundError) else str(error.strerror)
    return "" if found == size else f"it has {found:,} bytes instead of {size:,}"


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of the store in `folder`."""
    path = Path(folder).expanduser()
    try:
        if not (path / MANIFEST).exists():
            raise _refusal(folder, *_absent(path))
        values = read_object(path / MANIFEST)
    except OSError as error:  # a folder on the way is closed
        raise _refusal(folder, f"its {MANIFEST} cannot be read: {error}", "permission to read it") from error
    except UserError as error:
        if error.violations:
            raise
        raise _refusal(folder, str(error), "permission to read it, or a new store") from error
    if values.get("format") != FORMAT:
        raise _refusal(folder, f"its {MANIFEST} is not that of a token store", "a folder that titan-exp tokenize wrote")
    if values.get("version") != VERSION:
        reason = f"it has format version {values.get('version')}, and this version of titan-exp reads {VERSION}"
        raise _refusal(folder, reason, "tokenize again, or use the version of titan-exp that wrote it")
    try:
        return _manifest(path, values)
    except UserError as error:
        raise _refusal(folder, f"its {MANIFEST} is damaged: {error}", "tokenize into a new store") from error


def store_names(paths: Sequence[str]) -> list[str]:
    """Shortest unique names of stores: the folder's name, prefixed by parents if needed."""
    parts = [Path(path).expanduser().absolute().parts[1:] for path in paths]
    for depth in range(1, max(map(len, parts), default=0)):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return ["/".join(part) for part in parts]


def _manifest(path: Path, values: Mapping[str, Any]) -> Manifest:
    tokenizer, splits = table(values.get("tokenizer"), "tokenizer"), table(values.get("splits"), "splits")
    if (token_bytes := values.get("token_bytes")) not in (2, 4):
        raise UserError(f"token_bytes is {shown(token_bytes)[:60]}, and not 2 or 4.")
    return Manifest(
        path=path,
        source=text(values.get("source"), "source"),
        tokenizer=text(tokenizer.get("fingerprint"), "tokenizer.fingerprint"),
        vocab_size=count(tokenizer.get("vocab_size"), "tokenizer.vocab_size", 2**31),
        token_bytes=token_bytes,
        fingerprint=text(values.get("fingerprint"), "fingerprint"),
        splits={split: [_shard(one, split) for one in items(splits.get(split), f"splits.{split}")] for split in SPLITS},
        files=digests(values.get("files"), "files"),
    )


def _shard(values: object, split: str) -> Shard:
    shard, name = table(values, f"a shard of {split}"), f"of a shard of {split}"
    return Shard(
        file_name(shard.get("name"), f"name {name}"),
        count(shard.get("tokens"), f"tokens {name}"),
        count(shard.get("documents"), f"documents {name}"),
        digests(shard.get("checksums"), f"checksums {name}"),
    )


def _absent(path: Path) -> tuple[str, str]:
    if not path.is_dir():
        return "no such folder", "titan-exp tokenize data=text data.paths='[notes]' out=stores/mine writes one"
    if (path / UNFINISHED).is_dir():
        return "this store is not complete yet", "rerun the titan-exp tokenize command that began it"
    return f"it has no {MANIFEST}, so it is no token store", "a folder that titan-exp tokenize wrote"


def _refusal(folder: str | Path, reason: str, remedy: str) -> UserError:
    return UserError("The token store cannot be used.", [Violation("data.paths", str(folder), reason, remedy)])
