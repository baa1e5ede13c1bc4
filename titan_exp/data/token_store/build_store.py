"""Token store construction: lock, journal, tokenizer copy, worker processes, manifest."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.paths.data_files import tokenizer_file
from titan_exp.config.paths.foreign_file import read_object
from titan_exp.config.paths.token_store_manifest import MANIFEST, UNFINISHED, Manifest, read_manifest
from titan_exp.data.store_folder import explain_disk_errors, refusal, remove_temporary_files, store_lock
from titan_exp.data.token_store.corpus import Corpus
from titan_exp.data.token_store.progress import ProgressDisplay
from titan_exp.data.token_store.shard_writer import TEMPORARY_SUFFIX, write_json
from titan_exp.data.token_store.workers import tokenize_parts
from titan_exp.data.token_store.writer import TokenizeJob, describe_store, write_manifest
from titan_exp.data.tokenizers.build import build_tokenizer

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
