"""Files of data: texts, tokenizers and stores, what identifies their content, and the manifest of a token store."""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from math import ceil
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation, shown
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.paths.foreign_file import count, digests, read_object, table, text
from titan_exp.config.paths.store_manifest import Field, Shard, StoreManifest


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
    """Words of a tokenizer with their ids, from `bytes` or the path of its files.

    Raises:
        UserError: there is no such file, or it is no tokenizer.json.
    """
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
    return Violation(
        "data.validation_documents",
        data.validation_documents,
        "to hold documents out of a stream, the run would have to read all of it",
        "use data.validation_documents=1024 to evaluate the first 1024, or evaluation.every=0",
    )


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
        yield from _walk(path, path)
    elif path.is_file():
        yield path.name, path
    else:
        fixed = Path(*_fixed_parts(path.parts))
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
        enough = ceil((smallest + 1e-9) * 1000) / 1000
        remedy = f"data.validation_fraction={enough:g} to hold out at least one, or {remedy}"
    return _cannot_split(fraction, f"this fraction holds out none of the {count} documents", remedy, split_further)


def none_to_train_on(fraction: float, count: int, split_further: str | None) -> Violation:
    """Violation of a fraction that holds out all of `count` documents."""
    return _cannot_split(
        fraction,
        f"this fraction leaves none of the {count} documents to train on",
        "a smaller fraction",
        split_further,
    )


def _cannot_split(fraction: float, reason: str, remedy: str, split_further: str | None) -> Violation:
    if split_further is not None:
        remedy = f"{split_further} to cut the same text into more documents, or {remedy}"
    return Violation("data.validation_fraction", fraction, reason, f"use {remedy}")


def _walk(folder: Path, root: Path) -> Iterator[tuple[str, Path]]:
    for parent, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name != "__pycache__"]
        for name in names:
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(root).as_posix(), path


def _fixed_parts(parts: Sequence[str]) -> Iterator[str]:
    for part in parts:
        if glob.has_magic(part):
            return
        yield part


def user_folder(variable: str, default: str) -> Path:
    """Folder of titan_exp below the one that `variable` names, or below `default` in this user's home. Raises OSError
    if the user has no home, as in a container without an entry in /etc/passwd."""
    base = os.environ.get(variable) or os.path.expanduser(f"~/{default}")
    if base.startswith("~"):
        raise FileNotFoundError(f"this user has no home folder, and {variable} is not set")
    return Path(base) / "titan_exp"
