"""Token store construction: lock, journal, tokenizer copy, worker processes, manifest."""

import multiprocessing
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.paths.data_files import MANIFEST, UNFINISHED, Manifest, read_manifest, tokenizer_file
from titan_exp.config.paths.foreign_file import read_object
from titan_exp.data.data_warning import DataWarning
from titan_exp.data.store_folder import explain_disk_errors, refusal, remove_temporary_files, store_lock
from titan_exp.data.token_store.corpus import Corpus, CorpusPart
from titan_exp.data.token_store.writer import (
    TEMPORARY_SUFFIX,
    PartTokenizer,
    ReportProgress,
    TokenizeJob,
    describe_store,
    write_json,
    write_manifest,
)
from titan_exp.data.tokenizers import build_tokenizer

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

        from titan_exp.config.command_line.safe_output import Terminal

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
    """Tokenize parts in `workers` processes, or in this process with `workers=1`.

    Raises UserError if a process was killed, or re-raises a process's exception. The other processes are killed;
    finished shards are kept.
    """
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
    """Send parts to idle processes until all parts are done."""
    busy = set(pool)
    while busy:
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            try:
                kind, value = connection.recv()
            except EOFError:
                raise _killed(pool[connection]) from None
            if kind == "error":
                raise value
            if kind == "progress":
                report(*value)
            elif pending:
                connection.send(pending.pop())
            else:
                busy.remove(connection)


def _killed(process: BaseProcess) -> UserError:
    process.join()
    code = process.exitcode or 0
    cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return UserError(
        f"A tokenizer process died ({cause}). If memory ran out, use fewer processes: workers=1.\n"
        "  Finished shards are kept; type the same command to continue."
    )


def _serve(connection: Connection, job: TokenizeJob) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    warnings.simplefilter("ignore", DataWarning)  # it has warned already

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


_JOB = "job.json"
_KEYS = {
    "source": "data.paths",
    "content": "data.paths",
    "held_out": "data.validation_fraction",
    "tokenizer": "data.tokenizer",
    "token_bytes": "data.tokenizer",
}
"""Configuration keys of the settings in a store's description; other settings are `tokenize` options."""


def build_store(
    out: str, data: DataConfig, *, parts: int, shard_tokens: int, shuffle: int, workers: int
) -> tuple[Manifest, bool]:
    """Build or resume the store in folder `out`; returns its manifest, and True if anything was tokenized. Raises
    UserError if a file cannot be read or written, or the folder contains something else."""
    folder = Path(out).expanduser()
    with explain_disk_errors(folder):
        _check_folder(folder, out)
        corpus = Corpus(data, parts, shuffle)
        job = TokenizeJob(folder, data, parts, shard_tokens, corpus.fingerprint, shuffle)
        if (folder / MANIFEST).exists():
            _check_same(folder / MANIFEST, describe_store(job, corpus, build_tokenizer(data)), out)
            return read_manifest(folder), False
        job.journal.mkdir(parents=True, exist_ok=True)
        with store_lock(job.journal / "lock", out, "tokenize"):
            write_store(job, corpus, out, workers or len(os.sched_getaffinity(0)), announce=True)
    return read_manifest(folder), True


def write_store(job: TokenizeJob, corpus: Corpus, out: str, workers: int, *, announce: bool = False) -> None:
    """Write what is missing of a store, and its manifest; print first how much that is if `announce`.

    The caller holds a lock on the store. Raises UserError if its folder was begun with other settings.
    """
    data, folder = job.data, job.folder
    description = describe_store(job, corpus, build_tokenizer(data))
    job.journal.mkdir(parents=True, exist_ok=True)
    if (job.journal / _JOB).exists():
        _check_same(job.journal / _JOB, description, out)
    else:
        write_json(job.journal / _JOB, description)
    remove_temporary_files(job.folder, job.journal)
    _copy_tokenizer(data, folder)
    # Tokenize with the copy, so that tokens and copy agree.
    own = data if data.tokenizer == "bytes" else replace(data, tokenizer=str(folder))
    _tokenize(replace(job, data=own), corpus, out if announce else "", workers)
    write_manifest(job, corpus, description)


def _tokenize(job: TokenizeJob, corpus: Corpus, out: str, workers: int) -> None:
    pending = [part for part in corpus.parts if not job.is_finished(part)]
    done = len(corpus.parts) - len(pending)
    state = f"continued, {done} of {len(corpus.parts)} parts are done" if done else f"{len(pending)} parts"
    if out:
        print(f"{out}: {state}, {min(workers, len(pending)) or 1} at a time", flush=True)
    try:
        with ProgressDisplay(len(corpus.parts), done, corpus.documents).shown() as progress:
            tokenize_parts(job, pending, workers, progress.add)
    finally:
        remove_temporary_files(job.folder, job.journal)


def _copy_tokenizer(data: DataConfig, folder: Path) -> None:
    """Copy the tokenizer's files into the store, atomically."""
    if data.tokenizer == "bytes":
        return
    file = tokenizer_file(data.tokenizer)
    for source, name in ((file, "tokenizer.json"), (file.with_name("tokenizer_config.json"), "tokenizer_config.json")):
        if source.is_file():
            temporary = folder / f"{name}{TEMPORARY_SUFFIX}"
            shutil.copyfile(source, temporary)
            os.replace(temporary, folder / name)


def _check_folder(folder: Path, out: str) -> None:
    """Check that the folder is new, empty, or a store."""
    if folder.exists() and not folder.is_dir():
        raise refusal(out, "a file of this name exists", "another out")
    is_store = any((folder / name).exists() for name in (MANIFEST, UNFINISHED))
    if folder.is_dir() and any(folder.iterdir()) and not is_store:
        raise refusal(out, "the folder holds other files", "a new folder")


def _check_same(path: Path, description: dict[str, Any], out: str) -> None:
    """Check that an existing store in the folder, finished or not, has the requested settings."""
    try:
        saved = read_object(path)
    except UserError as error:
        raise refusal(out, str(error), "remove the folder") from error
    # Stores written before these were recorded.
    saved = {"shuffle": 0, "content": description["content"], **saved}
    violations = [
        Violation(
            _KEYS.get(key, key),
            "",
            f"{out} was built with {key} {saved.get(key)}, and now it is {description[key]}",
            "another out; or the previous setting; or remove the folder",
        )
        for key in description
        if saved.get(key) != description[key]
    ]
    if violations:
        raise UserError("The folder holds a store with other settings.", violations)
