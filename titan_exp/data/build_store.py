"""Token store construction: worker processes tokenize the resumable parts of a corpus into shards.

Parts are cut into shards by token count, so a store's content does not depend on the number of processes or restarts.
The journal has one file per cut, with the complete shards and the position to resume from.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from titan_exp.config import data_files
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.foreign_file import read_object
from titan_exp.config.groups.run import DataConfig
from titan_exp.data import sample_store
from titan_exp.data.batch import Permutation
from titan_exp.data.source_check import unit_hashes
from titan_exp.data.sources import base
from titan_exp.data.tokenizers import Tokenizer, build_tokenizer, encode_document

_CHUNK = 4096


@dataclass(frozen=True, order=True)
class CorpusPart:
    """Part of the corpus; parts are ordered."""

    split: str  # `train` (held-out documents included), or `validation` for a separate split
    number: int  # index in source order

    def __str__(self) -> str:
        return f"{self.split}-{self.number:05d}"


@dataclass(frozen=True)
class Document:
    """Document of a corpus part."""

    text: str  # text; may be empty
    split: str
    next_position: Callable[[], Any]  # returns the JSON position after this document; valid only for the latest one


class Corpus:
    """Text of the `data` group, divided into at most `max_parts` parts (a stream keeps its own parts). The held-out
    documents are the same as in `TrainLoader` and `ValidationLoader`. A non-zero `shuffle` seed permutes the training
    documents (held-out ones included), as a function of seed and number of documents. Raises UserError if the text
    cannot be read or shuffled."""

    def __init__(self, data: DataConfig, max_parts: int, shuffle: int = 0) -> None:
        own = base.build_validation_source(data)
        self._sources: dict[str, base.Source] = {"train": base.build_source(data)}
        if own is not None:
            self._sources["validation"] = own
        self._order: Permutation | None = None
        if shuffle:
            documents = self._sources["train"]
            if not isinstance(documents, base.RandomAccessSource):
                reason = "this source is a stream, which has an order of its own"
                downloaded = ", or data.streaming=false" if data.streaming else ""
                remedy = f"use shuffle=0 (training still shuffles windows){downloaded}"
                raise UserError("Cannot shuffle the documents.", [Violation("shuffle", shuffle, reason, remedy)])
            self._order = Permutation(max(1, len(documents)), "documents", shuffle)
        self._fraction = 0.0 if own is not None else data.validation_fraction
        self._counts = {
            split: min(len(source), max_parts) if isinstance(source, base.RandomAccessSource) else source.parts
            for split, source in self._sources.items()
        }
        self.fingerprint = "; ".join(base.fingerprint(source, data) for source in self._sources.values())
        self.content = [base.content_identity(source).get(base.CONTENT) for source in self._sources.values()]
        """Content of local files, per split; None if there are none."""
        self.held_out = f"split {data.validation_split}" if own is not None else self._fraction
        """Choice of validation documents: a share of the documents, or a separate split."""

    @property
    def parts(self) -> list[CorpusPart]:
        """All parts, in order."""
        return [CorpusPart(split, number) for split, count in self._counts.items() for number in range(count)]

    @property
    def documents(self) -> int | None:
        """Number of documents; None for a stream."""
        lengths = [len(source) for source in self._sources.values() if isinstance(source, base.RandomAccessSource)]
        return sum(lengths) if len(lengths) == len(self._sources) else None

    def read(self, part: CorpusPart, position: Any) -> Iterator[Document]:
        """Read the documents of a part from a position on (None: the beginning)."""
        source = self._sources[part.split]
        fraction = self._fraction if part.split == "train" else 1.0
        if not isinstance(source, base.RandomAccessSource):
            reader = source.open(part.number, position)
            for text in reader:
                split = "validation" if fraction and data_files.unit_hash(text) < fraction else "train"
                yield Document(text, split, reader.state_dict)
            return
        count = self._counts[part.split]
        begin, end = (len(source) * number // count for number in (part.number, part.number + 1))
        order = self._order if part.split == "train" else None
        for chunk in range(begin if position is None else position, end, _CHUNK):
            ranks = range(chunk, min(chunk + _CHUNK, end))
            indices = ranks if order is None else [order[rank] for rank in ranks]
            held_out = np.ones(len(ranks), dtype=bool)
            if fraction < 1 and isinstance(indices, range):
                held_out = unit_hashes(source, indices) < fraction
            elif fraction < 1:
                held_out = np.array([unit_hashes(source, range(index, index + 1))[0] < fraction for index in indices])
            for rank, index, held in zip(ranks, indices, held_out, strict=True):
                yield Document(source[index], "validation" if held else "train", lambda following=rank + 1: following)


ReportProgress = Callable[[int, int, int], None]
"""Called with the numbers of documents, tokens and parts completed since the last call."""
_REPORT_DOCUMENTS, _REPORT_TOKENS = 64, 1 << 18


@dataclass(frozen=True)
class TokenizeJob:
    """Settings of a token store to build."""

    folder: Path
    data: DataConfig
    parts: int  # maximum number of parts of a random-access source
    shard_tokens: int  # number of tokens after which a shard is closed
    source: str  # fingerprint of the text
    shuffle: int = 0  # seed of the document order; 0 keeps the source order

    @property
    def journal(self) -> Path:
        """Folder of the journal."""
        return self.folder / data_files.UNFINISHED

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


_Writers = dict[str, tuple[sample_store.ShardWriter, "array[int]"]]
"""Files of a shard and the offsets of its documents, by split."""


class PartTokenizer:
    """Tokenizes parts of a job; one per process. Raises UserError if text or tokenizer cannot be used."""

    def __init__(self, job: TokenizeJob, report: ReportProgress) -> None:
        self._job, self._report = job, report
        self._corpus = Corpus(job.data, job.parts, job.shuffle)
        if self._corpus.fingerprint != job.source:
            remedy = "Remove the folder of the store and start again."
            raise UserError(f"The text has changed since tokenization began. {remedy}")
        self._tokenizer = build_tokenizer(job.data)

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
        writers, shards = _Writers(), dict[str, Any]()
        try:
            last = self._fill(writers, name, documents)
            for split, (writer, begins) in writers.items():
                writer.add("documents", np.asarray(begins))
                shards[split] = writer.commit(writer.lengths)
            entry = {"shards": shards, "next": None if last is None else last.next_position()}
            sample_store.write_json(self._job.entry(part, cut), entry)
        finally:
            for writer, _ in writers.values():
                writer.close()
        return last is not None

    def _fill(self, writers: _Writers, name: str, documents: Iterator[Document]) -> Document | None:
        """Add documents until the shards are full; returns the last one, or None at the end of the part."""
        total = counted = added = 0
        for document in documents:
            counted += 1
            if document.text:
                tokens = encode_document(document.text, self._tokenizer)
                # Training from text skips documents without tokens, too.
                if len(tokens) > 1 or document.split == "validation":
                    if document.split not in writers:
                        fields = data_files.token_fields(token_bytes(self._tokenizer))
                        writer = sample_store.ShardWriter(self._job.folder, f"{document.split}-{name}", fields)
                        writers[document.split] = writer, array("Q")
                    writer, begins = writers[document.split]
                    begins.append(writer.lengths["tokens"])
                    writer.add("tokens", tokens)
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


def token_bytes(tokenizer: Tokenizer) -> int:
    """Bytes per token in a store."""
    return 2 if tokenizer.vocab_size <= 2**16 else 4


_LINE_INTERVAL_SECONDS = 10.0


class ProgressDisplay:
    """Progress of documents, tokens and finished parts; `documents` is None for a stream."""

    def __init__(self, parts: int, done: int, documents: int | None) -> None:
        self._parts, self._done, self._total = parts, done, documents
        self._documents = self._tokens = 0
        self._start = self._last_line = time.monotonic()
        self._bar = None

    @contextmanager
    def shown(self) -> Iterator["ProgressDisplay"]:
        """Show the counts during the `with` block."""
        if not sys.stderr.isatty():
            yield self
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from titan_exp.config.command_line.terminal import Terminal

        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Terminal(stderr=True), transient=True) as bar:
            self._bar, self._task = bar, bar.add_task("", total=self._parts, completed=self._done)
            yield self

    def add(self, documents: int, tokens: int, parts: int) -> None:
        """Add to the counts."""
        self._documents += documents
        self._tokens += tokens
        self._done += parts
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=str(self))
        elif time.monotonic() - self._last_line > _LINE_INTERVAL_SECONDS:
            self._last_line = time.monotonic()
            print(self, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-3)
        total = "" if self._total is None else f" of {self._total:,}"
        return (
            f"part {self._done} of {self._parts}, {self._documents:,}{total} documents, {self._tokens:,} tokens, "
            f"{self._tokens / seconds:,.0f} tokens/s"
        )


def tokenize_parts(job: TokenizeJob, parts: Sequence[CorpusPart], workers: int, report: ReportProgress) -> None:
    """Tokenize parts in `workers` processes, or in this process with `workers=1`. Raises UserError if a process was
    killed, or re-raises a process's exception. The other processes are killed; finished shards are kept."""
    workers = min(workers, len(parts))
    if workers == 1:
        tokenizer = PartTokenizer(job, report)
        for part in parts:
            tokenizer.run(part)
    if workers <= 1:
        return
    # Hugging Face tokenizers would start one thread per core in every process.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("spawn")
    pool: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(workers):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_serve, args=(child_end, job), daemon=True)
            process.start()
            child_end.close()
            pool[parent_end] = process
        _distribute(pool, list(reversed(parts)), report)
    finally:
        for connection, process in pool.items():
            process.kill()
            process.join()
            connection.close()


def _distribute(pool: dict[Connection, BaseProcess], pending: list[CorpusPart], report: ReportProgress) -> None:
    busy = set(pool)
    while busy:
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            try:
                kind, value = connection.recv()
            except EOFError:
                pool[connection].join()
                code = pool[connection].exitcode or 0
                cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise UserError(
                    f"A tokenizer process died ({cause}). If memory ran out, use fewer processes: workers=1.\n"
                    "  To continue, type the same command: it keeps the finished shards."
                ) from None
            if kind == "error":
                raise value
            if kind == "progress":
                report(*value)
            elif pending:
                connection.send(pending.pop())
            else:
                busy.remove(connection)


def _serve(connection: Connection, job: TokenizeJob) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    warnings.simplefilter("ignore", base.DataWarning)  # the worker has warned already

    def send(kind: str, value: Any = None) -> None:
        connection.send((kind, value))

    try:
        tokenizer = PartTokenizer(job, lambda *counts: send("progress", counts))
        while True:
            send("idle")
            tokenizer.run(connection.recv())
    except (EOFError, BrokenPipeError):
        return  # the parent exited
    except BaseException as error:
        send("error", error)


_KEYS = {
    "source": "data.paths",
    "content": "data.paths",
    "held_out": "data.validation_fraction",
    "tokenizer": "data.tokenizer",
    "token_bytes": "data.tokenizer",
}
"""Configuration keys of the settings; others are options of `tokenize`."""


def build_store(
    out: str, data: DataConfig, *, parts: int, shard_tokens: int, shuffle: int, workers: int
) -> tuple[data_files.Manifest, bool]:
    """Build or resume the store in folder `out`; returns its manifest, and True if anything was tokenized. Raises
    UserError if a file cannot be read or written, or the folder contains something else."""
    folder = Path(out).expanduser()
    with sample_store.explain_disk_errors(folder):
        sample_store.check_folder(folder, out)
        corpus = Corpus(data, parts, shuffle)
        job = TokenizeJob(folder, data, parts, shard_tokens, corpus.fingerprint, shuffle)
        made = write_store(job, corpus, out, workers or len(os.sched_getaffinity(0)), announce=True)
    return data_files.read_manifest(folder), made


def write_store(job: TokenizeJob, corpus: Corpus, out: str, workers: int, *, announce: bool = False) -> bool:
    """Write the missing part of a store, and its manifest; `announce` first prints how much is missing. Returns False
    if it was complete. Raises UserError if its folder was begun with other settings."""
    tokenizer = build_tokenizer(job.data)
    settings = {
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
    former, kind = {"shuffle": 0, "content": corpus.content}, data_files.Manifest
    store = sample_store.StoreWriter(kind, job.folder, out, settings, "job.json", keys=_KEYS, former=former)
    if store.is_finished():
        return False
    with store.lock():
        if job.data.tokenizer != "bytes":
            # We tokenize with the copy, so that tokens and copy agree.
            _copy_tokenizer(job.data.tokenizer, job.folder)
            job = replace(job, data=replace(job.data, tokenizer=str(job.folder)))
        pending = [part for part in corpus.parts if not job.is_finished(part)]
        done = len(corpus.parts) - len(pending)
        if announce:
            state = f"continued, {done} of {len(corpus.parts)} parts are done" if done else f"{len(pending)} parts"
            print(f"{out}: {state}, {min(workers, len(pending)) or 1} at a time", flush=True)
        with ProgressDisplay(len(corpus.parts), done, corpus.documents).shown() as progress:
            tokenize_parts(job, pending, workers, progress.add)
        splits: dict[str, list[dict[str, Any]]] = {split: [] for split in data_files.SPLITS}
        for entry in (entry for part in corpus.parts for entry in job.entries(part)):
            for split, shard in entry["shards"].items():
                splits[split].append(shard)
        files = {path.name: sample_store.file_checksum(path) for path in sorted(job.folder.glob("tokenizer*.json"))}
        store.finish(splits, [settings["tokenizer"], splits], files=files)
    return True


def _copy_tokenizer(tokenizer: str, folder: Path) -> None:
    file = data_files.tokenizer_file(tokenizer)
    for source, name in ((file, "tokenizer.json"), (file.with_name("tokenizer_config.json"), "tokenizer_config.json")):
        if source.is_file():
            temporary = folder / f"{name}{sample_store.TEMPORARY_SUFFIX}"
            shutil.copyfile(source, temporary)
            os.replace(temporary, folder / name)
