"""`titan-exp tokenize [data=... data.key=...] out=STORE`: text, from any source, into a token store.

What is read is said as in `titan-exp train`, by the `data` group with all of its keys, so that a command that trains
becomes one that tokenizes by its verb; what has no place in a run (`out`, `workers`, ...) are plain options beside it.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from titan_exp.config.command_line.parse_options import options_help, parse_options
from titan_exp.config.command_line.verb_options import TokenizeOptions
from titan_exp.config.errors.did_you_mean import listed, nearest
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.paths.token_store_manifest import MANIFEST, UNFINISHED, Manifest, read_manifest
from titan_exp.data.token_store.corpus import Corpus
from titan_exp.data.token_store.progress import Progress
from titan_exp.data.token_store.shard_writer import write_json
from titan_exp.data.token_store.verify import find_damage
from titan_exp.data.token_store.workers import tokenize_parts
from titan_exp.data.token_store.writer import JOB, TokenizeJob, describe_store, remove_temporary_files, write_manifest
from titan_exp.data.tokenizers.base import build_tokenizer
from titan_exp.rules.data import tokenizer_file, unreadable_source

_NAMED = 5
_KEYS = {
    "source": "data.paths",
    "held_out": "data.validation_fraction",
    "tokenizer": "data.tokenizer",
    "token_bytes": "data.tokenizer",
    "shard_tokens": "shard_tokens",
    "parts": "parts",
    "shuffle": "shuffle",
}


def options_among(words: Sequence[str]) -> tuple[TokenizeOptions, list[str]]:
    """The verb's own options among the words typed, and the other words, which are for the `data` group.

    Raises:
        UserError: an option's value is none; or a word sets a key that tokenizing does not read.
    """
    own, others = [], []
    names = [field.name for field in fields(TokenizeOptions)]
    groups = [field.name for field in fields(Experiment)]
    foreign = []
    for word in words:
        key, equals, value = word.partition("=")
        group = key.lstrip("+~").split(".")[0].split("@")[0]
        if equals and (key in names or ("." not in key and group not in groups and nearest(key, names, 1))):
            own.append(word)
        else:
            others.append(word)
        if equals and group in groups and group != "data" and not key.startswith("+experiment"):
            remedy = "leave it out; text and tokenizer are keys of data"
            foreign.append(Violation(key, value, "tokenizing does not read it", remedy))
    if foreign:
        raise UserError("The options cannot be read.", foreign)
    options = parse_options(TokenizeOptions, own)
    if options.check and (others or len(own) > 1):
        given = [word.partition("=")[0] for word in words if not word.startswith("check=")]
        remedy = f"leave {listed([f'{key}=' for key in given], 'and')} out"
        raise UserError("The options cannot be read.", [Violation("check", options.check, "it stands alone", remedy)])
    return options, others


def tokenize_help() -> str:
    """The text of `titan-exp tokenize --help`."""
    options = options_help("", TokenizeOptions).strip("\n")
    return f"""\
titan-exp tokenize: turn text into a token store, to train from at any scale.

  titan-exp tokenize [data=option] [data.key=value ...] out=STORE [options]

{options}

Examples
  titan-exp tokenize out=stores/stdlib
  titan-exp tokenize data=text data.paths='[notes,books/*.txt]' data.tokenizer=llama3/tokenizer.json out=stores/mine
  titan-exp tokenize data=fineweb_edu data.tokenizer=llama3 out=stores/edu workers=32
  titan-exp tokenize check=stores/mine
  titan-exp train data=tokens data.paths='[stores/mine]'

Killed at any moment, the same command continues. Every key of data: titan-exp train --cfg job --package data
"""


def check_store(folder: str) -> int:
    """Compare a store with its checksums, say what was found, and return the exit code.

    Raises:
        UserError: there is no such store, or it is damaged.
    """
    manifest = read_manifest(folder)
    found = list(find_damage(manifest))
    if found:
        lines = [f"{name}: {trouble}" for name, trouble in islice(found, _NAMED)]
        more = [f"and {len(found) - _NAMED} more"] if len(found) > _NAMED else []
        words = "\n  ".join([*lines, *more])
        raise UserError(f"{folder} is damaged.\n  {words}\n  Copy it anew, or remove the folder and tokenize again.")
    print(f"{folder}: every file is as it was written. {_summary(manifest)}")
    return 0


def make_store(options: TokenizeOptions, experiment: Experiment) -> int:
    """Make the store that the options and the `data` group describe, or continue it; returns the exit code.

    Raises:
        UserError: something cannot be read or written, or the folder holds something else.
    """
    wrong = unreadable_source(experiment)
    if experiment.data.source == "tokens":
        wrong = [Violation("data.source", "tokens", "it is tokens already", "a source of text, such as data=text")]
    if not options.out:
        wrong.append(Violation("out", "", "no folder is named for the store", "out=stores/mine"))
    if wrong:
        raise UserError("This cannot be tokenized.", wrong)
    folder = Path(options.out).expanduser()
    with _in_words(folder):
        _require_own(folder, options.out)
        corpus = Corpus(experiment.data, options.parts, options.shuffle)
        job = TokenizeJob(
            folder, experiment.data, options.parts, options.shard_tokens, corpus.fingerprint, options.shuffle
        )
        description = describe_store(job, corpus, build_tokenizer(experiment.data))
        if (folder / MANIFEST).exists():
            _require_same(folder / MANIFEST, description, options.out)
            print(f"{options.out} is done, so nothing was tokenized. {_summary(read_manifest(folder))}")
            return 0
        _make(job, corpus, description, options)
    manifest = read_manifest(folder)
    print(f"{options.out}: {_summary(manifest)}")
    if not manifest.documents["validation"]:
        print("Nothing was held out: train with training.evaluate_every=0, or with a store that has documents for it.")
    print(f"To train from it: titan-exp train data=tokens data.paths='[{options.out}]'")
    return 0


def _make(job: TokenizeJob, corpus: Corpus, description: dict[str, Any], options: TokenizeOptions) -> None:
    job.journal.mkdir(parents=True, exist_ok=True)
    with _held(job.journal / "lock", options.out):
        began = job.journal / JOB
        if began.exists():
            _require_same(began, description, options.out)
        else:
            write_json(began, description)
        remove_temporary_files(job)
        _copy_tokenizer(job.data, job.folder)
        # From here on the copy is what is used, so that it is what the tokens are of.
        own = job.data if job.data.tokenizer == "bytes" else replace(job.data, tokenizer=str(job.folder))
        left = [part for part in corpus.parts if not _finished(job, part)]
        done = len(corpus.parts) - len(left)
        workers = options.workers or len(os.sched_getaffinity(0))
        begun = f"continued, {done} of {len(corpus.parts)} parts are done" if done else f"{len(left)} parts"
        print(f"{options.out}: {begun}, {min(workers, len(left)) or 1} at a time", flush=True)
        try:
            with Progress(len(corpus.parts), done, corpus.documents).shown() as progress:
                tokenize_parts(replace(job, data=own), left, workers, progress.add)
        finally:
            remove_temporary_files(job)
        write_manifest(job, corpus, description)


def _finished(job: TokenizeJob, part: Any) -> bool:
    entries = job.entries(part)
    return bool(entries) and entries[-1]["next"] is None


def _copy_tokenizer(data: DataConfig, folder: Path) -> None:
    """Copy the tokenizer's files into the store, so that the store says what its tokens mean."""
    if data.tokenizer == "bytes":
        return
    file = tokenizer_file(data.tokenizer)
    for source, name in ((file, "tokenizer.json"), (file.with_name("tokenizer_config.json"), "tokenizer_config.json")):
        if source.is_file():
            _copy_whole(source, folder / name)


def _copy_whole(source: Path, target: Path) -> None:
    """Copy a file, whole or not at all."""
    temporary = target.with_name(f"{target.name}.part")
    shutil.copyfile(source, temporary)
    os.replace(temporary, target)


def _require_own(folder: Path, out: str) -> None:
    """The folder is new, empty, or a store."""
    if folder.exists() and not folder.is_dir():
        raise _refusal(out, "there is a file of this name", "another out")
    if (
        folder.is_dir()
        and any(folder.iterdir())
        and not any((folder / name).exists() for name in (MANIFEST, UNFINISHED))
    ):
        raise _refusal(out, "the folder holds other files", "a new folder")


def _require_same(path: Path, description: dict[str, Any], out: str) -> None:
    """What was made, or begun, in the folder is what is asked for now."""
    import json

    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _refusal(out, f"its {path.name} is not JSON: {error}", "remove the folder") from error
    there = {"shuffle": 0, **there}  # as it was before there was a choice
    differing = [key for key in description if there.get(key) != description[key]]
    if differing:
        raise UserError(
            "The folder holds a store of something else.",
            [
                Violation(
                    _KEYS.get(key, key),
                    "",
                    f"{out} was made with {key} {there.get(key)}, and now it is {description[key]}",
                    "another out; or the same as then; or remove the folder",
                )
                for key in differing
            ],
        )


@contextmanager
def _held(path: Path, out: str) -> Iterator[None]:
    """One process at a time makes a store; the system lets go of it when that process is gone."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "another titan-exp tokenize is making this store right now"
            raise _refusal(out, reason, "wait for it, or stop it") from None
        yield


@contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    """Errors of the system that a user can put right, said as such."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"The disk of {folder} is full. What was finished stays there: make room, and the same command "
                "continues; or remove the folder."
            ) from error
        begun = (folder / UNFINISHED).is_dir()
        stays = f" What was finished stays in {folder}; the same command continues." if begun else ""
        raise UserError(f"{error.filename or type(error).__name__}: {error.strerror or error}.{stays}") from error


def _summary(manifest: Manifest) -> str:
    size = sum(size for _, size in manifest.sizes())
    parts = [
        f"{manifest.tokens[split]:,} tokens of {manifest.documents[split]:,} documents {what}"
        for split, what in (("train", "to train on"), ("validation", "held out"))
    ]
    return f"{listed(parts, 'and')}, {size / 1e6:,.1f} MB"


def _refusal(out: str, reason: str, remedy: str) -> UserError:
    return UserError("The store cannot be made.", [Violation("out", out, reason, remedy)])
