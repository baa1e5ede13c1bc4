"""Files of data: texts, tokenizers and stores, what identifies their content, and the manifests of stores.

`manifest.json` is written last: a store that has it is complete. A split is a list of shards, and a shard has a file
for each field. Ragged samples, which differ in length, are two fields: the values of all, and where each begins.
"""

import glob
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, ClassVar, Self

from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.config.foreign_file import count, digests, file_name, items, read_object, table, text
from titan_exp.config.groups.run import DataConfig

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
        """Read the manifest of the store in `folder`. Raises UserError if there is none, or it is damaged or of another
        kind or version."""
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
                reason = f"this folder has no {MANIFEST}, so it is not a {cls.store}"
                raise refusal(reason, f"give a folder that {verb} wrote")
            values = read_object(path / MANIFEST)
        except OSError as error:  # a folder on the way is closed
            reason = f"titan_exp cannot read its {MANIFEST}: {error}"
            raise refusal(reason, "ask for the permission to read it") from error
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


@dataclass(frozen=True, kw_only=True)
class Manifest(StoreManifest):
    """Manifest of a complete token store."""

    store = "token store"
    verb = "tokenize"
    example = "write one with titan-exp tokenize data=text data.paths='[notes]' out=stores/mine"
    numbers = ("tokens", "documents")
    repair = "check the whole store with titan-exp tokenize check={folder}, then copy it again or rebuild it"
    source: str
    """Fingerprint of the source text."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocab_size: int
    """Largest token id plus 1."""
    token_bytes: int
    """Bytes per token: 2 or 4."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a token store."""
        tokenizer = table(values.get("tokenizer"), "tokenizer")
        if (token_bytes := values.get("token_bytes")) not in (2, 4):
            raise UserError(f"token_bytes is {shown(token_bytes)[:60]} instead of 2 or 4.")
        return {
            "source": text(values.get("source"), "source"),
            "tokenizer": text(tokenizer.get("fingerprint"), "tokenizer.fingerprint"),
            "vocab_size": count(tokenizer.get("vocab_size"), "tokenizer.vocab_size", 2**31),
            "token_bytes": token_bytes,
            "files": digests(values.get("files"), "files"),
        }

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Number of tokens of each split, including end-of-text tokens."""
        return self.total("tokens")

    @cached_property
    def documents(self) -> dict[str, int]:
        """Number of documents of each split."""
        return self.total("documents")

    def fields(self, shard: Shard) -> Sequence[Field]:
        """Tokens of all documents, and where each begins."""
        return token_fields(self.token_bytes, **shard.numbers)


read_manifest = Manifest.read


def token_fields(token_bytes: int, tokens: int = 0, documents: int = 0) -> Sequence[Field]:
    """Fields of a shard of a token store."""
    return Field("tokens", f"<u{token_bytes}", (tokens,)), Field("documents", "<u8", (documents,))


def store_names(paths: Sequence[str]) -> list[str]:
    """Shortest unique names of stores: the folder's name, prefixed by parents if needed."""
    parts = [Path(path).expanduser().absolute().parts[1:] for path in paths]
    for depth in range(1, max(map(len, parts), default=0)):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return ["/".join(part) for part in parts]


def store_splits(paths: Sequence[str], *, all_documents: bool) -> dict[str, tuple[Manifest, str]]:
    """Splits of stores to evaluate on, which have two tokens or more, by name: the held-out ones, named like the stores
    (empty for a single one), or with `all_documents` every one, named by store and split. Raises UserError if a store
    cannot be read."""
    names = store_names(paths) if len(paths) > 1 else [""]
    found: dict[str, tuple[Manifest, str]] = {}
    for name, manifest in zip(names, map(read_manifest, paths), strict=True):
        for split in (split for split, tokens in manifest.tokens.items() if tokens >= 2):
            if all_documents or split == "validation":
                found[f"{name} {split}".strip() if all_documents else name] = manifest, split
    return found


END_OF_TEXT = "<|endoftext|>"
"""Name of the byte tokenizer's end-of-text token in its file."""


def tokenizer_file(name: str) -> Path:
    """Path of the tokenizer.json for `data.tokenizer`, given as a file or a folder."""
    path = Path(name).expanduser()
    return path / "tokenizer.json" if path.is_dir() else path


def tokenizer_path(config: DataConfig) -> str:
    """`bytes`, or the path of the tokenizer's files: `data.tokenizer`, or the copy in the first store. Raises UserError
    if that store cannot be read."""
    if config.tokenizer != "store":
        return config.tokenizer
    if not config.paths:
        violation = Violation("data.paths", (), "you gave no token store", "name one, as in data.paths='[stores/mine]'")
        raise UserError("There is no tokenizer.", [violation])
    manifest = read_manifest(config.paths[0])
    return "bytes" if manifest.tokenizer == "bytes" else str(manifest.path)


def tokenizer_words(path: str) -> dict[str, int]:
    """Words of a tokenizer with their ids, from `bytes` or the path of its files. Raises UserError if there is no such
    file, or it is no tokenizer.json."""
    if path == "bytes":
        return byte_words()
    file = tokenizer_file(path)
    described = read_object(file)
    model, added = described.get("model"), described.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(vocabulary, list):
            vocabulary = {word: number for number, (word, *_) in enumerate(vocabulary)}
        words = {**vocabulary, **{token["content"]: token["id"] for token in added}}  # type: ignore[dict-item]
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{file} is not a tokenizer.json of Hugging Face's tokenizers.") from error
    if not words or any(type(number) is not int or not 0 <= number < 2**31 for number in words.values()):
        raise UserError(f"{file} is not a tokenizer.json of Hugging Face's tokenizers.")
    return words


def byte_words() -> dict[str, int]:
    """Words of the byte tokenizer: the printable character of each byte in byte-level vocabularies (Radford et al.
    2019), and the end of text."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    words = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    return {**words, END_OF_TEXT: 256}


def unlimited_split(data: DataConfig) -> Violation:
    """Violation of a validation split held out of a stream without a limit."""
    reason = "to hold documents out of a stream, the run would have to read all of it"
    remedy = "use data.validation_documents=1024 to evaluate the first 1024, or evaluation.every=0"
    return Violation("data.validation_documents", data.validation_documents, reason, remedy)


LARGEST_TEXT = 2**30
"""Bytes of text above which a run does not tokenize first, while its GPUs wait."""
SPLIT_FURTHER = {"file": "data.document=paragraph", "paragraph": "data.document=line", "line": None}
"""Setting that splits a text into more documents, by `data.document`."""
_BINARY_CHECK_BYTES = 8192


def existing(pattern: str) -> list[str]:
    """Files and folders that an entry of a key names."""
    return glob.glob(str(Path(pattern).expanduser()), recursive=True)


def no_such_file(entry: str, key: str) -> Violation:
    """Violation of an entry of a key that names nothing."""
    folder = Path(entry).expanduser().absolute().parent
    while not os.path.exists(folder):  # False below a closed folder, where Path.exists raises
        folder = folder.parent
    remedy = f"give a path relative to the current folder (of this one, {folder} exists)"
    if not os.access(folder, os.R_OK | os.X_OK):
        remedy = f"ask the owner of {folder}, which you may not open, so the file may exist"
    return Violation(key, entry, "no such file or folder", remedy)


def matching_files(entry: str) -> Iterator[tuple[str, Path]]:
    """Pairs of key and path; keys are relative to the entry's fixed part, so that moving a corpus keeps its keys."""
    path = Path(entry).expanduser()
    if path.is_dir():
        for parent, subfolders, names in os.walk(path):
            subfolders[:] = [name for name in subfolders if not name.startswith(".") and name != "__pycache__"]
            for file in (Path(parent, name) for name in names if not name.startswith(".")):
                if file.is_file():
                    yield file.relative_to(path).as_posix(), file
    elif path.is_file():
        yield path.name, path
    else:
        fixed = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
        for match in map(Path, glob.glob(str(path), recursive=True)):
            if match.is_file():
                yield match.relative_to(fixed).as_posix(), match


def distinct_files(entries: Sequence[str]) -> dict[Path, str]:
    """Keys of all files by their real path, of which a file that several entries name has the first."""
    found: dict[Path, str] = {}
    for entry in entries:
        for key, path in matching_files(entry):
            found.setdefault(path.resolve(), key)
    return found


def is_binary(path: Path) -> bool:
    """True if a file has a NUL byte near its start."""
    with path.open("rb") as file:
        return b"\0" in file.read(_BINARY_CHECK_BYTES)


def is_text(path: Path, *, blank: bool = True) -> bool:
    """True if a file is neither empty nor binary; without `blank`, if it also has more than white space."""
    if path.stat().st_size == 0 or is_binary(path):
        return False
    with path.open("rb") as file:
        return blank or bool(file.read(_BINARY_CHECK_BYTES).strip()) or any(map(bytes.strip, file))


@lru_cache(maxsize=8)  # a sweep asks for each of its runs
def corpus_size(entries: tuple[str, ...], *, only_text: bool) -> int:
    """Bytes of the files; with `only_text`, of those that are not binary, if all are above `LARGEST_TEXT`."""
    size = sum(path.stat().st_size for entry in entries for _, path in matching_files(entry))
    if size <= LARGEST_TEXT or not only_text:
        return size
    return sum(path.stat().st_size for path in distinct_files(entries) if not is_binary(path))


def unit_hash(identity: str) -> float:
    """Hash of a document's identity in [0, 1); documents with `unit_hash(identity) < fraction` are held out."""
    digest = blake2b(identity.encode("utf-8", errors="surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def none_held_out(fraction: float, count: int, smallest: float, split_further: str | None) -> Violation:
    """Violation of a fraction that holds out none of `count` documents, of which `smallest` is the least hash."""
    remedy = "evaluation.every=0 to train without evaluation"
    if count > 1:
        enough = math.ceil((smallest + 1e-9) * 1000) / 1000
        remedy = f"data.validation_fraction={enough:g} to hold out at least one, or {remedy}"
    return _cannot_split(fraction, f"this fraction holds out none of the {count} documents", remedy, split_further)


def none_to_train_on(fraction: float, count: int, split_further: str | None) -> Violation:
    """Violation of a fraction that holds out all of `count` documents."""
    reason = f"this fraction leaves none of the {count} documents to train on"
    return _cannot_split(fraction, reason, "a smaller fraction", split_further)


def _cannot_split(fraction: float, reason: str, remedy: str, split_further: str | None) -> Violation:
    if split_further is not None:
        remedy = f"{split_further} to cut the same text into more documents, or {remedy}"
    return Violation("data.validation_fraction", fraction, reason, f"use {remedy}")


def user_folder(variable: str, default: str) -> Path:
    """Folder of titan_exp below the one that `variable` names, or below `default` in this user's home. Raises OSError
    if the user has no home, as in a container without an entry in /etc/passwd."""
    base = os.environ.get(variable) or os.path.expanduser(f"~/{default}")
    if base.startswith("~"):
        raise FileNotFoundError(f"this user has no home folder, and {variable} is not set")
    return Path(base) / "titan_exp"
