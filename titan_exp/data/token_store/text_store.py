"""Token store of a text, in your cache folder: the first rank of the first run tokenizes its documents, once.

A digest of documents, tokenizer and held-out fraction names a store, so a changed text or tokenizer gets a new one. Its
folder has `lock`, held while the store is written; `unfinished`, which a killed rank leaves for the next one to
continue; and `store`, to which it is renamed.
"""

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from stat import S_ISDIR

from titan_exp.config.data_files import LARGEST_TEXT, VERSION, Manifest, read_manifest, user_folder
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.data_sets import open_files
from titan_exp.config.schema.foreign_code import sources
from titan_exp.data.sample_store import explain_disk_errors
from titan_exp.data.sources.base import (
    STREAMING,
    CorpusContent,
    RandomAccessSource,
    Source,
    content_identity,
    fingerprint,
    held_out_fraction,
)
from titan_exp.data.token_store.build_store import TokenizeJob, write_store
from titan_exp.data.token_store.corpus import Corpus
from titan_exp.data.tokenizers import Tokenizer

PART_BYTES, MERGED_PART_BYTES, SHARD_TOKENS = 2**26, 2**22, 2**27
"""Bytes of text per further process that make starting it worthwhile, with the tokenizer `bytes` and with one that
merges; tokens of a shard."""
_SAMPLES = 64
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredText:
    """Text that is tokenized once, before training."""

    data: DataConfig
    source: RandomAccessSource
    size: int
    """Bytes of its files, or an estimate from evenly spaced documents."""
    digest: str
    """Digest of what its store is made from."""

    @property
    def _parts(self) -> int:
        return 1 + self.size // (PART_BYTES if self.data.tokenizer == "bytes" else MERGED_PART_BYTES)

    def find(self) -> Manifest | None:
        """Find the finished store; None if there is none."""
        return next(filter(None, (_finished(place / self.digest) for place in _places())), None)

    def make(self) -> Manifest:
        """Find the store, or write it while other processes wait.

        Raises:
            UserError: it cannot be written anywhere, or the text changed meanwhile.
        """
        if (found := self.find()) is not None:
            return found
        problems = list[str]()
        for place in _places(make=True):
            if self._parts > 1:  # every rank logs, since rank 0 may be one that waits
                megabytes, folder = self.size / 1e6, place / self.digest
                _LOGGER.info("tokenizing %.0f MB of text, once for this and later runs, in %s", megabytes, folder)
            try:
                return self._make(place / self.digest)
            except OSError as error:
                if not _is_of(place, error):
                    with explain_disk_errors(place):
                        raise
                problems.append(f"{place}: {error.strerror or error}")
                _LOGGER.warning("%s. So each machine keeps its tokens of the text elsewhere, if it can", problems[-1])
        reason = f"there is no folder to write the tokens of the text to ({'; '.join(problems)})"
        remedy = (
            f"use {STREAMING}=true to tokenize while training, or set XDG_CACHE_HOME=/scratch/$USER in the environment"
        )
        raise UserError("Cannot tokenize the text.", [Violation(STREAMING, False, reason, remedy)])

    def _make(self, folder: Path) -> Manifest:
        folder.mkdir(parents=True, exist_ok=True)
        store, unfinished = folder / "store", folder / "unfinished"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (found := _finished(folder)) is not None:
                return found
            shutil.rmtree(store, ignore_errors=True)
            data = replace(self.data, validation_split=None, validation_fraction=held_out_fraction(self.data))
            corpus = Corpus(data, self._parts)
            job = TokenizeJob(unfinished, data, self._parts, SHARD_TOKENS, corpus.fingerprint)
            try:
                write_store(job, corpus, str(unfinished), len(os.sched_getaffinity(0)))
            except OSError as error:
                if _is_of(folder, error):  # a full disk must not keep a part of it
                    shutil.rmtree(unfinished, ignore_errors=True)
                raise
            content, files = getattr(self.source, "content", None), open_files(data)
            if content is not None and files is not None and content.stamp != files.content.stamp:
                shutil.rmtree(unfinished)
                raise UserError("The text has changed since tokenization began. Type the same command again.")
            unfinished.rename(store)
        return read_manifest(store)


def stored_text(data: DataConfig, source: Source, tokenizer: Tokenizer) -> StoredText | None:
    """Identify a text. None if its documents are tokenized while training: a stream, a text larger than `LARGEST_TEXT`,
    or your own source without a fingerprint, whose documents may change without notice."""
    own = data.source not in sources()
    if data.streaming or not isinstance(source, RandomAccessSource):
        return None
    if own and not isinstance(getattr(source, "fingerprint", None), str):
        return None
    content = getattr(source, "content", None)
    files = content if isinstance(content, CorpusContent) else None
    size = _estimated_size(source) if files is None else files.size
    if size > LARGEST_TEXT:
        return None
    made_from = [
        [VERSION, PART_BYTES, MERGED_PART_BYTES, SHARD_TOKENS],
        [data.source, sorted(data.options.items()), list(data.paths), len(source)] if own else [],
        fingerprint(source, data),
        content_identity(source),
        # A checksum of samples would miss edits between them.
        files.stamp if files is not None and files.is_sampled else "",
        tokenizer.fingerprint,
        held_out_fraction(data),
    ]
    digest = blake2b(json.dumps(made_from, default=str).encode(errors="replace"), digest_size=16).hexdigest()
    return StoredText(data, source, size, digest)


def _estimated_size(source: RandomAccessSource) -> int:
    count = len(source)
    sample = sorted({count * number // _SAMPLES for number in range(_SAMPLES)})
    return sum(len(str(source[index]).encode(errors="replace")) for index in sample) * count // len(sample)


def _places(*, make: bool = False) -> Iterator[Path]:
    """Folders for stores: your cache folder, then this machine's temporary folder."""
    with suppress(OSError):  # no home folder
        yield user_folder("XDG_CACHE_HOME", ".cache") / "tokens"
    folder = Path(tempfile.gettempdir()) / f"titan_exp-{os.getuid()}"
    with suppress(OSError):
        if make:
            folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        # Everybody can write here, so we never read another user's folder of this name.
        if S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            yield folder / "tokens"


def _is_of(place: Path, error: OSError) -> bool:
    """True if an error concerns a folder for stores, or a parent of it, rather than a file of the text."""
    return error.filename is None or str(error.filename).startswith(str(place)) or Path(error.filename) in place.parents


def _finished(folder: Path) -> Manifest | None:
    """Finished and undamaged store below a folder, if any."""
    with suppress(UserError, OSError):
        manifest = read_manifest(folder / "store")
        return None if any(manifest.damaged()) else manifest
    return None
