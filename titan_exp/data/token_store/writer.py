"""Turning the parts of a corpus into shards, each written once: what was finished before a death stays.

A part is cut into shards where they have enough tokens, so what a store holds does not depend on how many processes
made it or how often they died. The journal, a file for each cut, says which shards are whole and where to go on.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.paths.token_store_manifest import FORMAT, MANIFEST, SPLITS, UNFINISHED, VERSION
from titan_exp.data.token_store.corpus import Corpus, CorpusPart, Document
from titan_exp.data.token_store.shard_writer import TEMPORARY, ShardWriter, checksum, write_json
from titan_exp.data.tokenizers.base import Tokenizer, build_tokenizer
from titan_exp.data.virtual_shards.indexed_stream import encode_document

JOB = "job.json"
Tell = Callable[[int, int], None]
"""Called now and then with how many documents and tokens have been added since."""
_TOLD_EVERY = 64


@dataclass(frozen=True)
class TokenizeJob:
    """A store to make."""

    folder: Path
    """Of the store."""
    data: DataConfig
    """Text and tokenizer."""
    parts: int
    """Parts that text is divided into, at most, where any document can be read at once."""
    shard_tokens: int
    """Tokens after which a shard is full."""
    source: str
    """Fingerprint of the text."""
    shuffle: int = 0
    """Seed of the documents' order; 0 is the source's."""

    @property
    def journal(self) -> Path:
        """Folder of the journal."""
        return self.folder / UNFINISHED

    def entries(self, part: CorpusPart) -> list[dict[str, Any]]:
        """What the journal says of a part, a dictionary for each cut, in order."""
        found = []
        while (path := self.entry(part, len(found))).exists():
            found.append(json.loads(path.read_text()))
        return found

    def entry(self, part: CorpusPart, number: int) -> Path:
        """The file of the journal for a cut of a part, counted from 0."""
        return self.journal / f"{part}-{number:04d}.json"


class PartTokenizer:
    """Tokenizes parts of a job; built anew in each process. Raises UserError where text or tokenizer cannot be used."""

    def __init__(self, job: TokenizeJob) -> None:
        self._job = job
        self._corpus = Corpus(job.data, job.parts, job.shuffle)
        if self._corpus.fingerprint != job.source:
            raise UserError("The text has changed while it was tokenized. Remove the store's folder and begin again.")
        self._tokenizer = build_tokenizer(job.data)
        self._token_bytes = token_bytes(self._tokenizer)

    def run(self, part: CorpusPart, tell: Tell) -> None:
        """Make the shards of a part that are not made yet."""
        done = self._job.entries(part)
        position, number = (done[-1]["next"], len(done)) if done else (None, 0)
        if done and position is None:
            return
        documents = self._corpus.read(part, position)
        more = True
        while more:
            more = self._cut(part, number, documents, tell)
            number += 1

    def _cut(self, part: CorpusPart, number: int, documents: Any, tell: Tell) -> bool:
        """Write the next shard of each split and note it; returns whether there may be more documents."""
        name = f"{part.number:05d}-{number:04d}"
        writers: dict[str, ShardWriter] = {}
        try:
            last = self._fill(writers, name, documents, tell)
            shards = {split: writer.finish() for split, writer in writers.items()}
            entry = {"shards": shards, "next": None if last is None else last.after()}
            _sync(self._job.folder)
            write_json(self._job.entry(part, number), entry)
        except BaseException:
            for writer in writers.values():
                writer.discard()
            raise
        return last is not None

    def _fill(self, writers: dict[str, ShardWriter], name: str, documents: Any, tell: Tell) -> Document | None:
        """Add documents until the shards have enough tokens; returns the last one, or None at the part's end."""
        counted = tokens = added = 0
        for document in documents:
            counted += 1
            if document.text:
                ids = encode_document(document.text, self._tokenizer)
                # As in training from the text itself, which passes over documents without a token.
                if len(ids) > 1 or document.split == "validation":
                    if document.split not in writers:
                        writers[document.split] = ShardWriter(
                            self._job.folder, f"{document.split}-{name}", self._token_bytes
                        )
                    writers[document.split].add(ids)
                    added += len(ids)
                    tokens += len(ids)
            if counted == _TOLD_EVERY or added >= 1 << 18:
                tell(counted, added)
                counted = added = 0
            if tokens >= self._job.shard_tokens:
                tell(counted, added)
                return document
        tell(counted, added)
        return None


def describe_store(job: TokenizeJob, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a store is made of and how, in JSON's types; what makes another store if it differs."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": corpus.fingerprint,
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
    """Write the manifest over all that the journal says is whole, and remove the journal."""
    splits: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for part in corpus.parts:
        for entry in job.entries(part):
            for split, shard in entry["shards"].items():
                splits[split].append(shard)
    files = {}
    for path in sorted(job.folder.glob("tokenizer*.json")):
        digest = checksum()
        digest.update(path.read_bytes())
        files[path.name] = digest.hexdigest()
    digest = checksum()
    digest.update(json.dumps([description["tokenizer"], splits], sort_keys=True).encode())
    write_json(
        job.folder / MANIFEST, {**description, "fingerprint": digest.hexdigest(), "files": files, "splits": splits}
    )
    _sync(job.folder)
    shutil.rmtree(job.journal, ignore_errors=True)


def remove_temporary_files(job: TokenizeJob) -> None:
    """Remove files that a death left torn."""
    for folder in (job.folder, job.journal):
        for path in folder.glob(f"*{TEMPORARY}"):
            path.unlink(missing_ok=True)


def token_bytes(tokenizer: Tokenizer) -> int:
    """Bytes of a token in a store."""
    return 2 if tokenizer.vocab_size <= 2**16 else 4


def _sync(folder: Path) -> None:
    """Wait until the disk knows the names of new files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems refuse to sync a folder, and then rename is all there is
    finally:
        os.close(descriptor)
