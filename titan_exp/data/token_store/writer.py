"""Token store writer: tokenizes the parts of a corpus into shards, resumable after a kill at any time.

Parts are cut into shards by token count, so that a store's content does not depend on the number of processes or
restarts. The journal, one file per cut, lists the complete shards and the position to resume from.
"""

import contextlib
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.paths.data_files import (
    BEGIN_BYTES,
    FORMAT,
    MANIFEST,
    SPLITS,
    UNFINISHED,
    VERSION,
    Manifest,
)
from titan_exp.config.paths.foreign_file import read_object
from titan_exp.data.token_store.corpus import Corpus, CorpusPart, Document
from titan_exp.data.tokenizers import Tokenizer, build_tokenizer, encode_document

TEMPORARY_SUFFIX = ".part"
"""Suffix of a file during writing."""
_BUFFER_BYTES = 1 << 20


def checksum() -> Any:
    """New hasher for a store's files, about 1 GB/s."""
    return blake2b(digest_size=16)


def write_json(path: Path, values: Any) -> None:
    """Write `values` as JSON, atomically."""
    file = AtomicFile(path)
    try:
        file.write(json.dumps(values, indent=1).encode() + b"\n")
        file.commit()
    except BaseException:
        file.discard()
        raise


class AtomicFile:
    """File written under a temporary name; `commit` syncs it to disk and renames it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A process whose parent was killed may briefly write the same file.
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
        self._file = self._temporary.open("wb", buffering=_BUFFER_BYTES)
        self._digest = checksum()

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

    def discard(self) -> None:
        """Delete the temporary file."""
        self._temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # closing flushes the buffer, which fails again on a full disk
            self._file.close()


class ShardWriter:
    """Writes the two files of a shard, document by document."""

    def __init__(self, folder: Path, name: str, token_bytes: int) -> None:
        self._name = name
        self._dtype = np.dtype(f"<u{token_bytes}")
        self._tokens = AtomicFile(folder / f"{name}.tokens")
        self._path = folder / f"{name}.documents"
        self._offsets = array("Q")
        self.tokens = 0

    def add(self, tokens: np.ndarray) -> None:
        """Append the tokens of one document."""
        self._offsets.append(self.tokens)
        self._tokens.write(tokens.astype(self._dtype).data)
        self.tokens += len(tokens)

    def commit(self) -> dict[str, Any]:
        """Commit both files; returns the shard's manifest entry."""
        documents = AtomicFile(self._path)
        try:
            documents.write(np.asarray(self._offsets, dtype=f"<u{BEGIN_BYTES}").data)
            checksums = {"tokens": self._tokens.commit(), "documents": documents.commit()}
        except BaseException:
            documents.discard()
            raise
        return {
            "name": self._name,
            "tokens": self.tokens,
            "documents": len(self._offsets),
            "checksums": checksums,
        }

    def discard(self) -> None:
        """Delete the temporary file."""
        self._tokens.discard()


def find_damage(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Damaged files of a store and their problems; reads the whole store."""
    missing = dict(manifest.damaged())
    yield from missing.items()
    expected = dict(manifest.files)
    for shards in manifest.splits.values():
        for shard in shards:
            expected |= {f"{shard.name}.{suffix}": value for suffix, value in shard.checksums.items()}
    present = [name for name in expected if name not in missing]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, found in zip(
            present, pool.map(lambda name: file_checksum(manifest.path / name), present), strict=True
        ):
            if found != expected[name]:
                yield name, "its content has changed"


def file_checksum(path: Path) -> str:
    """Checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, checksum).hexdigest()


ReportProgress = Callable[[int, int, int], None]
"""Called with the numbers of documents, tokens and parts completed since the last call."""
_REPORT_DOCUMENTS, _REPORT_TOKENS = 64, 1 << 18


@dataclass(frozen=True)
class TokenizeJob:
    """Settings of a token store to build."""

    folder: Path
    data: DataConfig
    parts: int
    """Maximum number of parts of a random-access source."""
    shard_tokens: int
    """Number of tokens after which a shard is closed."""
    source: str
    """Fingerprint of the text."""
    shuffle: int = 0
    """Seed of the document order; 0 keeps the source order."""

    @property
    def journal(self) -> Path:
        """Folder of the journal."""
        return self.folder / UNFINISHED

    def entries(self, part: CorpusPart) -> list[dict[str, Any]]:
        """Journal entries of a part, one per cut, in order."""
        found = []
        while (path := self.entry(part, len(found))).exists():
            found.append(read_object(path))
        return found

    def entry(self, part: CorpusPart, cut: int) -> Path:
        """Journal file of a cut of a part, counted from 0."""
        return self.journal / f"{part}-{cut:04d}.json"

    def is_finished(self, part: CorpusPart) -> bool:
        """True if all shards of the part are written."""
        entries = self.entries(part)
        return bool(entries) and entries[-1]["next"] is None


class PartTokenizer:
    """Tokenizes parts of a job; one per process. Raises UserError if text or tokenizer cannot be used."""

    def __init__(self, job: TokenizeJob, report: ReportProgress) -> None:
        self._job = job
        self._report = report
        self._corpus = Corpus(job.data, job.parts, job.shuffle)
        if self._corpus.fingerprint != job.source:
            raise UserError("The text changed during tokenization. Remove the store's folder and start again.")
        self._tokenizer = build_tokenizer(job.data)
        self._token_bytes = token_bytes(self._tokenizer)

    def run(self, part: CorpusPart) -> None:
        """Write the missing shards of a part."""
        if not self._job.is_finished(part):
            done = self._job.entries(part)
            documents = self._corpus.read(part, done[-1]["next"] if done else None)
            cut = len(done)
            while self._write_cut(part, cut, documents):
                cut += 1
        self._report(0, 0, 1)

    def _write_cut(self, part: CorpusPart, cut: int, documents: Iterator[Document]) -> bool:
        """Write the next shard of each split and its journal entry; returns True if there may be more documents."""
        name = f"{part.number:05d}-{cut:04d}"
        writers: dict[str, ShardWriter] = {}
        try:
            last = self._fill(writers, name, documents)
            shards = {split: writer.commit() for split, writer in writers.items()}
            entry = {"shards": shards, "next": None if last is None else last.next_position()}
            _sync_folder(self._job.folder)
            write_json(self._job.entry(part, cut), entry)
        except BaseException:
            for writer in writers.values():
                writer.discard()
            raise
        return last is not None

    def _fill(self, writers: dict[str, ShardWriter], name: str, documents: Iterator[Document]) -> Document | None:
        """Add documents until the shards are full; returns the last one, or None at the end of the part."""
        total = counted = added = 0
        for document in documents:
            counted += 1
            if document.text:
                tokens = encode_document(document.text, self._tokenizer)
                # Training from text also skips documents without tokens.
                if len(tokens) > 1 or document.split == "validation":
                    if document.split not in writers:
                        writers[document.split] = ShardWriter(
                            self._job.folder, f"{document.split}-{name}", self._token_bytes
                        )
                    writers[document.split].add(tokens)
                    added += len(tokens)
                    total += len(tokens)
            full = total >= self._job.shard_tokens
            if full or counted == _REPORT_DOCUMENTS or added >= _REPORT_TOKENS:
                self._report(counted, added, 0)
                counted = added = 0
            if full:
                return document
        self._report(counted, added, 0)
        return None


def describe_store(job: TokenizeJob, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """JSON-serializable identity of a store: settings that change its content."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": corpus.fingerprint,
        "content": corpus.content,
        "held_out": corpus.held_out,
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text,
        },
        "token_bytes": token_bytes(tokenizer),
        "shard_tokens": job.shard_tokens,
        "parts": len(corpus.parts),
        "shuffle": job.shuffle,
    }


def write_manifest(job: TokenizeJob, corpus: Corpus, description: dict[str, Any]) -> None:
    """Write the manifest of all shards in the journal, and remove the journal."""
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for part in corpus.parts:
        for entry in job.entries(part):
            for split, shard in entry["shards"].items():
                splits[split].append(shard)
    files = {path.name: file_checksum(path) for path in sorted(job.folder.glob("tokenizer*.json"))}
    digest = checksum()
    digest.update(json.dumps([description["tokenizer"], splits], sort_keys=True).encode())
    write_json(
        job.folder / MANIFEST, {**description, "fingerprint": digest.hexdigest(), "files": files, "splits": splits}
    )
    _sync_folder(job.folder)
    shutil.rmtree(job.journal, ignore_errors=True)


def token_bytes(tokenizer: Tokenizer) -> int:
    """Bytes per token in a store."""
    return 2 if tokenizer.vocab_size <= 2**16 else 4


def _sync_folder(folder: Path) -> None:
    """Sync the names of new files to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems refuse to sync a folder
    finally:
        os.close(descriptor)
