"""The validation split, once per iteration, in rows that do not depend on the layout.

Its documents, in the source's order and as many as `data.validation_documents` allows, are one sequence of tokens;
row n of it goes to data rank n mod dp. Each store of a mixture is a sequence of its own, so that it has its own loss.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain, islice
from typing import Protocol

import numpy as np

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.data import DataConfig
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.paths.data_files import unlimited_split
from titan_exp.config.paths.token_store_manifest import read_manifest, store_names
from titan_exp.data.batch import Batch, collate
from titan_exp.data.sources.base import (
    RandomAccessSource,
    Source,
    StreamingSource,
    build_source,
    build_validation_source,
)
from titan_exp.data.token_store.reader import TokenSplit
from titan_exp.data.tokenizers.base import Tokenizer, build_tokenizer
from titan_exp.data.validation_split import unit_hash, validation_subset
from titan_exp.data.virtual_shards.indexed_stream import encode_document
from titan_exp.ops.loss.cross_entropy import IGNORE_INDEX


class ValidationLoader:
    """One data rank's batches [micro_batch_size, seq_len] of the split. Every rank yields equally many, and each row of
    the split is on exactly one rank; rows that fill up predict nothing. Text is tokenized once, and its tokens are
    kept; those of a store stay there.

    With `everything`, it is all documents of the source instead, those to train on included.

    Raises UserError where the split would be empty, or is held out of a stream without a limit.
    """

    def __init__(
        self, experiment: Experiment, *, dp_rank: int, dp_degree: int, micro_batch_size: int, everything: bool = False
    ) -> None:
        rows = functools.partial(
            SplitBatches, experiment, dp_rank=dp_rank, dp_degree=dp_degree, micro_batch_size=micro_batch_size
        )
        self.sources: dict[str, SplitBatches] = {
            name: rows(read) for name, read in _sequences(experiment.data, everything).items()
        }
        """The split of each source of a mixture, by its name; the only one otherwise, by an empty name."""

    def __len__(self) -> int:
        """Number of batches; the same on every rank."""
        return sum(map(len, self.sources.values()))

    def __iter__(self) -> Iterator[Batch]:
        return chain.from_iterable(self.sources.values())


class TokenSequence(Protocol):
    """The documents of a split, end to end."""

    @property
    def tokens(self) -> int:
        """How many tokens there are, at least 2."""
        ...

    def read(self, begin: int, window: np.ndarray) -> list[int]:
        """Fill `window` with the tokens from `begin` on, all of which there are; returns where in it documents begin,
        its first token left out."""
        ...


class SplitBatches:
    """One data rank's batches of the documents of one split.

    Args:
        experiment: the run.
        open_: gives the documents; called once, when they are needed.
        dp_rank: this rank.
        dp_degree: how many there are.
        micro_batch_size: rows of a batch.
    """

    def __init__(
        self,
        experiment: Experiment,
        open_: Callable[[], TokenSequence],
        *,
        dp_rank: int,
        dp_degree: int,
        micro_batch_size: int,
    ) -> None:
        self._config = experiment.data
        self._seq_len = experiment.training.seq_len
        self._open = open_
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        self._micro_batch_size = micro_batch_size

    def __len__(self) -> int:
        """Number of batches; the same on every rank."""
        rows = math.ceil((self._sequence.tokens - 1) / self._seq_len)
        return math.ceil(rows / (self._micro_batch_size * self._dp_degree))

    def __iter__(self) -> Iterator[Batch]:
        for batch in range(len(self)):
            first = batch * self._micro_batch_size
            rows = range(first, first + self._micro_batch_size)
            yield self._batch([self._dp_rank + row * self._dp_degree for row in rows])

    @cached_property
    def _sequence(self) -> TokenSequence:
        return self._open()

    def _batch(self, rows: list[int]) -> Batch:
        sequence, windows = self._sequence, np.zeros((len(rows), self._seq_len + 1), dtype=np.int64)
        starts = []
        for window, row in zip(windows, rows, strict=True):
            at = row * self._seq_len
            there = max(0, min(len(window), sequence.tokens - at))
            starts.append(sequence.read(at, window[:there]) if there else [])
        batch = collate(
            windows,
            starts,
            document_mask=self._config.document_mask,
            reset_positions=self._config.reset_positions,
        )
        for labels, row in zip(batch.labels, rows, strict=True):
            labels[max(0, sequence.tokens - 1 - row * self._seq_len) :] = IGNORE_INDEX
        return batch


class _TokenizedTexts:
    """A `TokenSequence` in memory."""

    def __init__(self, texts: Iterable[str], tokenizer: Tokenizer) -> None:
        documents = [encode_document(text, tokenizer) for text in texts]
        self._all = np.concatenate(documents)
        self._begins = np.cumsum([0, *map(len, documents[:-1])])
        self.tokens = len(self._all)

    def read(self, begin: int, window: np.ndarray) -> list[int]:
        window[:] = self._all[begin : begin + len(window)]
        first, last = np.searchsorted(self._begins, (begin + 1, begin + len(window)))
        return (self._begins[first:last] - begin).tolist()


class _StoredTexts:
    """A `TokenSequence` in a token store, which stays there."""

    def __init__(self, split: TokenSplit, documents: int | None) -> None:
        self.tokens = split.tokens_in(documents)
        self.read = split.read


def _sequences(config: DataConfig, everything: bool) -> dict[str, Callable[[], TokenSequence]]:
    """What opens the documents of each source, by name. Raises UserError where a source has none to evaluate on."""
    if config.source == "tokens":
        names = store_names(config.paths) if len(config.paths) > 1 else [""]
        if everything:
            return _whole_stores(config, names)
        splits = [_stored_split(path) for path in config.paths]
        opens = [functools.partial(_StoredTexts, split, config.validation_documents) for split in splits]
        return dict(zip(names, opens, strict=True))
    return {"": functools.partial(_TokenizedTexts, _Texts(config, everything), build_tokenizer(config))}


def _whole_stores(config: DataConfig, names: list[str]) -> dict[str, Callable[[], TokenSequence]]:
    """Both splits of each store."""
    found: dict[str, Callable[[], TokenSequence]] = {}
    for name, path in zip(names, config.paths, strict=True):
        manifest = read_manifest(path)
        for split, tokens in manifest.tokens.items():
            if tokens >= 2:
                opened = TokenSplit(manifest, split)
                found[f"{name} {split}".strip()] = functools.partial(_StoredTexts, opened, config.validation_documents)
    return found


def _stored_split(path: str) -> TokenSplit:
    manifest = read_manifest(path)
    if manifest.tokens["validation"] < 2:
        reason = "this store was made without documents to evaluate on"
        violation = Violation("data.paths", path, reason, "training.evaluate_every=0, or another store")
        raise UserError("There is nothing to evaluate on.", [violation])
    return TokenSplit(manifest, "validation")


class _Texts:
    """The documents to evaluate on; each iteration reads them again. Raises UserError where there are none."""

    def __init__(self, config: DataConfig, everything: bool) -> None:
        self._limit = config.validation_documents
        self._fraction = 1.0
        own = None if everything else build_validation_source(config)
        self._source = build_source(config) if own is None else own
        if everything:
            _require_end(self._source, config)
        elif own is None:
            self._hold_out(config)
        if next(iter(self), None) is None:
            raise _empty(config)

    def __iter__(self) -> Iterator[str]:
        source = self._source
        if isinstance(source, RandomAccessSource):
            texts = (text for text in map(source.__getitem__, range(len(source))) if text)
        else:
            texts = self._streamed(source)
        return islice(texts, self._limit)

    def _hold_out(self, config: DataConfig) -> None:
        if config.validation_fraction == 0:
            remedy = "data.validation_fraction=0.02, or training.evaluate_every=0 to go without evaluation"
            violation = Violation("data.validation_fraction", 0.0, "it holds out nothing to evaluate on", remedy)
            raise UserError("There is nothing to evaluate on.", [violation])
        if isinstance(self._source, RandomAccessSource):
            self._source = validation_subset(self._source, config.validation_fraction)
        else:
            _require_end(self._source, config)
            self._fraction = config.validation_fraction

    def _streamed(self, source: StreamingSource) -> Iterator[str]:
        for part in range(source.parts):
            yield from (text for text in source.open(part, None) if text and unit_hash(text) < self._fraction)


def _require_end(source: Source, config: DataConfig) -> None:
    if not isinstance(source, RandomAccessSource) and config.validation_documents is None:
        raise UserError("There is no end to what would be evaluated on.", [unlimited_split(config)])


def _empty(config: DataConfig) -> UserError:
    reason = "the documents to evaluate on hold no text"
    remedy = "a larger data.validation_fraction, or training.evaluate_every=0 to go without evaluation"
    if config.validation_split is not None:
        violation = Violation("data.validation_split", config.validation_split, reason, "another split")
    else:
        violation = Violation("data.validation_fraction", config.validation_fraction, reason, remedy)
    return UserError("There is nothing to evaluate on.", [violation])
