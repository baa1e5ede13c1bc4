"""Token stores: a split as one sequence of tokens, read through memory maps, and the store of a text in your cache.

A digest of documents, tokenizer and held-out fraction names a store, so a changed text or tokenizer gets a new one. Its
folder has `lock`, held while the store is written; `unfinished`, which a killed rank leaves for the next one to
continue; and `store`, to which it is renamed.
"""

import fcntl
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from stat import S_ISDIR
from typing import Any
from zipfile import BadZipFile

import numpy as np

from titan_exp.config import data_files
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.data_sets import open_files
from titan_exp.config.schema.foreign_code import sources
from titan_exp.data.batch import Permutation, RowSampler, SamplerState
from titan_exp.data.build_store import Corpus, TokenizeJob, write_store
from titan_exp.data.sample_store import StoreSplit, explain_disk_errors
from titan_exp.data.sources import base
from titan_exp.data.tokenizers import Tokenizer

ReadWindow = Callable[[int, np.ndarray], list[int]]
"""Fills a window with the tokens from an offset on; returns its document starts, excluding the first token."""


@dataclass(frozen=True)
class TokenSequence:
    """Tokens of concatenated documents."""

    tokens: int  # number of tokens, at least 2
    read: ReadWindow


def concatenate(documents: Iterable[np.ndarray]) -> TokenSequence:
    """Concatenate tokenized documents in memory."""
    parts = list(documents)
    return sequence_of(np.concatenate(parts), np.cumsum([0, *map(len, parts[:-1])]))


def sequence_of(tokens: np.ndarray, starts: np.ndarray) -> TokenSequence:
    """Sequence of tokens in memory, whose documents have these `starts`."""

    def read(begin: int, window: np.ndarray) -> list[int]:
        window[:] = tokens[begin : begin + len(window)]
        first, last = np.searchsorted(starts, (begin + 1, begin + len(window)))
        return (starts[first:last] - begin).tolist()

    return TokenSequence(len(tokens), read)


class TokenSplit(StoreSplit):
    """Tokens of a split, concatenated."""

    def read(self, begin: int, window: np.ndarray) -> list[int]:
        """Fill `window` with the tokens from `begin` on; returns its document starts, excluding the first token. Raises
        UserError if a shard is damaged."""
        filled, starts = 0, []
        number = self.shard_of(begin)
        while filled < len(window):
            tokens, begins = self.map(number)
            offset = begin + filled - self.offsets[number]
            chunk = tokens[offset : offset + len(window) - filled]
            window[filled : filled + len(chunk)] = chunk
            first, last = np.searchsorted(begins, (offset, offset + len(chunk)))
            starts += (begins[first:last].astype(np.int64) - offset + filled).tolist()
            filled += len(chunk)
            number += 1
        return starts[1:] if starts and starts[0] == 0 else starts

    def tokens_in(self, documents: int | None) -> int:
        """Number of tokens in the first `documents` documents (None: all)."""
        if documents is None:
            return len(self)
        for number, shard in enumerate(self.shards):
            if documents < shard.numbers["documents"]:
                _, begins = self.map(number)
                return self.offsets[number] + int(begins[documents])
            documents -= shard.numbers["documents"]
        return len(self)


def open_split(split: TokenSplit, documents: int | None) -> TokenSequence:
    """Sequence of the first `documents` documents of a split (None: all)."""
    return TokenSequence(split.tokens_in(documents), split.read)


ROUNDED_PERIOD = 2**16  # longest period in earlier versions, which rounded other shares to multiples of its inverse


class Mixture:
    """Mixture: assigns rows to sources with shares exactly proportional to `weights`. With `rounded`, shares that need
    a period above `ROUNDED_PERIOD` are rounded as in earlier versions, to one row per period or more."""

    def __init__(self, weights: Sequence[float], *, rounded: bool = False) -> None:
        exact = [Fraction(str(weight)) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        self.period = math.lcm(*(share.denominator for share in shares))
        """Number of rows after which the interleaving repeats."""
        self.quotas = [int(share * self.period) for share in shares]
        """Number of rows of each source in a period."""
        if rounded and self.period > ROUNDED_PERIOD:
            self.quotas = [max(1, round(share * ROUNDED_PERIOD)) for share in shares]
            self.period = sum(self.quotas)
        common = math.lcm(*self.quotas)
        self._spacings = [common // quota for quota in self.quotas]

    def __getitem__(self, row: int) -> tuple[int, int]:
        """Source of a row, and how many rows of that source precede it."""
        counts = self.counts(row)
        source = self._next(counts)
        return source, counts[source]

    def counts(self, rows: int) -> list[int]:
        """Number of rows of each source among the first `rows` rows."""
        # After t of P rows, each source has had its quota times t / P, rounded: at most half a row too many.
        time = rows - len(self.quotas) // 2
        counts = [max(0, (2 * quota * time + self.period) // (2 * self.period)) for quota in self.quotas]
        for _ in range(rows - sum(counts)):
            counts[self._next(counts)] += 1
        return counts

    def _next(self, counts: Sequence[int]) -> int:
        times = [(2 * count + 1) * spacing for count, spacing in zip(counts, self._spacings, strict=True)]
        return times.index(min(times))


STATE = "store"  # key of the position in a sampler's state


class WindowSampler(RowSampler):
    """`Sampler` over the windows of one or several token stores, in the order of a mixture. `corpus` is the identity of
    the data, and windows of several stores have names."""

    state_name = STATE
    store = data_files.Manifest.store

    def __init__(
        self,
        windows: "Mapping[str, Windows]",
        mixture: Mixture,
        corpus: dict[str, Any],
        *,
        dp_rank: int,
        dp_degree: int,
    ) -> None:
        super().__init__(corpus, dp_rank, dp_degree)
        self._names, self._windows = list(windows), list(windows.values())
        self._mixture = mixture

    def read(self, row: int, target: np.ndarray) -> list[int]:
        """Fill a window; returns its document starts."""
        source, number = self._mixture[row]
        return self._windows[source].read(number, target)

    def source_name(self, row: int) -> str:
        """Store of a row; empty for a single store."""
        return self._names[self._mixture[row][0]] if len(self._names) > 1 else ""

    def epochs(self, state: SamplerState) -> dict[str, float]:
        """Epochs over the windows of each store, and over all windows under the empty name."""
        rows = state[STATE]["rows"]
        epochs = {"": rows / sum(windows.rows for windows in self._windows)}
        if len(self._names) > 1:
            counts = zip(self._names, self._mixture.counts(rows), self._windows, strict=True)
            epochs |= {name: count / windows.rows for name, count, windows in counts}
        return epochs


def build_store_sampler(
    data: DataConfig, seq_len: int, seed: int, *, dp_rank: int, dp_degree: int, rounded: bool = False
) -> WindowSampler:
    """Open the stores of `data.paths`; `rounded` is as in `Mixture`. Raises UserError if one cannot be used."""
    manifests = [data_files.read_manifest(path) for path in data.paths]
    windows = [ShuffledWindows(manifest, seq_len, seed, number) for number, manifest in enumerate(manifests)]
    corpus: dict[str, Any] = {
        "data.paths": [manifest.fingerprint for manifest in manifests],
        "data.weights": list(data.weights),
        "experiment.seed": seed,
        "training.seq_len": seq_len,
    }
    mixture = Mixture(data.weights or [windows_.rows for windows_ in windows], rounded=rounded)
    if mixture.period > ROUNDED_PERIOD and not rounded:
        corpus[base.MIXTURE] = "exact"
    named = dict(zip(data_files.store_names(data.paths), windows, strict=True))
    return WindowSampler(named, mixture, corpus, dp_rank=dp_rank, dp_degree=dp_degree)


class ShuffledWindows:
    """Windows of one store, reshuffled every epoch. Raises UserError if the store is smaller than a window. `number`
    distinguishes the stores of a mixture, so that stores of equal size have different orders."""

    def __init__(self, manifest: data_files.Manifest, seq_len: int, seed: int, number: int) -> None:
        self._tokens = TokenSplit(manifest, "train")
        self._seq_len = seq_len
        self.rows, self._rest = divmod(len(self._tokens) - 1, seq_len)
        if self.rows < 1:
            reason = f"{manifest.path} has {len(self._tokens)} tokens to train on, and one row takes {seq_len + 1}"
            violation = Violation("training.seq_len", seq_len, reason, "use a shorter one, or a larger store")
            raise UserError("The token store is too small.", [violation])
        self._order = lru_cache(maxsize=4)(lambda epoch: Permutation(self.rows, "windows", seed, number, epoch))
        self._shift = lru_cache(maxsize=4)(
            lambda epoch: int(data_files.unit_hash(f"shift/{seed}/{number}/{epoch}") * (self._rest + 1))
        )

    def read(self, number: int, window: np.ndarray) -> list[int]:
        """Fill `window` [seq_len + 1] with window `number`, counted through all epochs; returns its document starts
        (each in 1..seq_len)."""
        epoch, rank = divmod(number, self.rows)
        return self._tokens.read(self._shift(epoch) + self._order(epoch)[rank] * self._seq_len, window)


class RepeatedTokens:
    """Windows of a split that is shorter than a window, read over and over in its own order."""

    def __init__(self, tokens: TokenSplit, seq_len: int) -> None:
        self._tokens, self._seq_len = tokens, seq_len
        self.rows = len(tokens) / seq_len

    def read(self, number: int, window: np.ndarray) -> list[int]:
        """Fill `window` with the tokens from `number * seq_len` on; returns its document starts."""
        starts, filled = list[int](), 0
        while filled < len(window):
            begin = (number * self._seq_len + filled) % len(self._tokens)
            part = window[filled : filled + len(self._tokens) - begin]
            starts += [filled] * (begin == 0 and filled > 0)
            starts += [filled + start for start in self._tokens.read(begin, part)]
            filled += len(part)
        return starts


Windows = ShuffledWindows | RepeatedTokens  # windows of one store, numbered through all epochs; `rows` an epoch

PART_BYTES, MERGED_PART_BYTES, SHARD_TOKENS = 2**26, 2**22, 2**27
"""Bytes of text per further process that make starting it worthwhile, with the tokenizer `bytes` and with one that
merges; tokens of a shard."""
LARGEST_KEPT = 2**28  # largest tokens of a part of a text that are kept, in bytes
_SAMPLES = 64
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredText:
    """Text that is tokenized once, before training."""

    data: DataConfig
    source: base.RandomAccessSource
    size: int  # bytes of its files, or an estimate from evenly spaced documents
    digest: str  # digest of what its store is made from

    @property
    def _parts(self) -> int:
        return 1 + self.size // (PART_BYTES if self.data.tokenizer == "bytes" else MERGED_PART_BYTES)

    def find(self) -> data_files.Manifest | None:
        """Find the finished store; None if there is none."""
        return next(filter(None, (_finished(place / self.digest) for place in _places())), None)

    def make(self) -> data_files.Manifest:
        """Find the store, or write it while other processes wait. Raises UserError if it cannot be written anywhere, or
        the text changed meanwhile."""
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
        elsewhere = "set XDG_CACHE_HOME=/scratch/$USER in the environment"
        remedy = f"use {base.STREAMING}=true to tokenize while training, or {elsewhere}"
        raise UserError("Cannot tokenize the text.", [Violation(base.STREAMING, False, reason, remedy)])

    def _make(self, folder: Path) -> data_files.Manifest:
        folder.mkdir(parents=True, exist_ok=True)
        store, unfinished = folder / "store", folder / "unfinished"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (found := _finished(folder)) is not None:
                return found
            shutil.rmtree(store, ignore_errors=True)
            data = replace(self.data, validation_split=None, validation_fraction=base.held_out_fraction(self.data))
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
        return data_files.read_manifest(store)


def stored_text(data: DataConfig, source: base.Source, tokenizer: Tokenizer) -> StoredText | None:
    """Identify a text. None if its documents are tokenized while training: a stream, a text larger than `LARGEST_TEXT`,
    or your own source without a fingerprint, whose documents may change without notice."""
    if data.streaming or not isinstance(source, base.RandomAccessSource):
        return None
    if (identity := _identity(data, source, tokenizer)) is None:
        return None
    content = getattr(source, "content", None)
    if isinstance(content, base.CorpusContent):
        size = content.size
    else:
        sample = sorted({len(source) * number // _SAMPLES for number in range(_SAMPLES)})
        held = sum(len(str(source[index]).encode(errors="replace")) for index in sample)
        size = held * len(source) // len(sample)
    if size > data_files.LARGEST_TEXT:
        return None
    made_from = [
        [data_files.VERSION, PART_BYTES, MERGED_PART_BYTES, SHARD_TOKENS],
        *identity,
        base.held_out_fraction(data),
    ]
    return StoredText(data, source, size, _digest(made_from))


def tokens_of_a_part(
    data: DataConfig, source: base.Source, tokenizer: Tokenizer, part: Sequence[Any], documents: Iterable[np.ndarray]
) -> TokenSequence:
    """Sequence of tokenized documents that are a `part` of a text, such as the first 200. They are read from your cache
    folder once they lie there, unless the text can change without notice."""
    identity, streamed = _identity(data, source, tokenizer), not isinstance(source, base.RandomAccessSource)
    if identity is None or (streamed and not base.content_identity(source)):
        return concatenate(documents)
    name = f"{_digest([*identity, *part])}.npz"
    for place in _places():
        damage = (OSError, ValueError, LookupError, EOFError, BadZipFile)
        with suppress(*damage), (place / name).open("rb") as file, np.load(file) as found:
            return sequence_of(found["tokens"], found["starts"])  # with checksums
    parts = list(documents)
    content: Any = getattr(source, "content", None)
    tokens, starts = np.concatenate(parts), np.cumsum([0, *map(len, parts[:-1])])
    files = open_files(data) if isinstance(content, base.CorpusContent) else None
    if tokens.nbytes <= LARGEST_KEPT and (files is None or files.content.stamp == content.stamp):
        for place in _places(make=True):
            with suppress(OSError):  # training does without
                place.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=place) as folder:
                    np.savez(Path(folder, name), tokens=tokens, starts=starts)
                    os.replace(Path(folder, name), place / name)
                break
    return sequence_of(tokens, starts)


def _identity(data: DataConfig, source: base.Source, tokenizer: Tokenizer) -> list[Any] | None:
    """Identity of a text's tokens; None for your own source without a fingerprint."""
    own = data.source not in sources()
    if own and not isinstance(getattr(source, "fingerprint", None), str):
        return None
    content, size = getattr(source, "content", None), len(source) if isinstance(source, base.RandomAccessSource) else 0
    return [
        [data.source, sorted(data.options.items()), list(data.paths), size] if own else [],
        base.fingerprint(source, data),
        base.content_identity(source),
        # A checksum of samples would miss edits between them.
        content.stamp if isinstance(content, base.CorpusContent) and content.is_sampled else "",
        tokenizer.fingerprint,
    ]


def _digest(made_from: Sequence[Any]) -> str:
    return blake2b(json.dumps(made_from, default=str).encode(errors="replace"), digest_size=16).hexdigest()


def _places(*, make: bool = False) -> Iterator[Path]:
    """Folders for stores: your cache folder, then this machine's temporary folder."""
    with suppress(OSError):  # no home folder
        yield data_files.user_folder("XDG_CACHE_HOME", ".cache") / "tokens"
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


def _finished(folder: Path) -> data_files.Manifest | None:
    with suppress(UserError, OSError):
        manifest = data_files.read_manifest(folder / "store")
        return None if any(manifest.damaged()) else manifest
    return None
