"""The validation split, once per iteration, in rows that do not depend on the layout.

Its documents, in the source's order and as many as `data.validation_documents` allows, are one sequence of tokens;
row n of it goes to data rank n mod dp.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import islice

import numpy as np

from titan_exp.config.data import DataConfig
from titan_exp.config.errors import UserError, Violation
from titan_exp.config.experiment import Experiment
from titan_exp.config.rules.data import unlimited_split
from titan_exp.data.batch import Batch, assemble
from titan_exp.data.document_stream import with_end_of_text
from titan_exp.data.held_out import held_out_part, place
from titan_exp.data.source import RandomAccessSource, StreamingSource, build_source, build_validation_source
from titan_exp.data.tokenizer import build_tokenizer
from titan_exp.ops.cross_entropy import IGNORE_INDEX


class ValidationLoader:
    """One data rank's batches [micro_batch_size, seq_len] of the split. Every rank yields equally many, and each row of
    the split is on exactly one rank; rows that fill up predict nothing. Tokens are kept after the first iteration.

    Raises UserError where the split would be empty, or is held out of a stream without a limit.
    """

    def __init__(self, experiment: Experiment, *, dp_rank: int, dp_degree: int, micro_batch_size: int) -> None:
        self._config = experiment.data
        self._seq_len = experiment.training.seq_len
        self._dp_rank, self._dp_degree = dp_rank, dp_degree
        self._micro_batch_size = micro_batch_size
        self._tokenizer = build_tokenizer(experiment.data)
        self._texts = _Texts(experiment.data)

    def __len__(self) -> int:
        """Number of batches; the same on every rank."""
        tokens, _ = self._sequence
        rows = math.ceil((len(tokens) - 1) / self._seq_len)
        return math.ceil(rows / (self._micro_batch_size * self._dp_degree))

    def __iter__(self) -> Iterator[Batch]:
        for batch in range(len(self)):
            first = batch * self._micro_batch_size
            rows = range(first, first + self._micro_batch_size)
            yield self._batch([self._dp_rank + row * self._dp_degree for row in rows])

    @cached_property
    def _sequence(self) -> tuple[np.ndarray, np.ndarray]:
        """All tokens [tokens], and where documents begin among them, ascending."""
        documents = [with_end_of_text(text, self._tokenizer) for text in self._texts]
        return np.concatenate(documents), np.cumsum([0, *map(len, documents[:-1])])

    def _batch(self, rows: list[int]) -> Batch:
        tokens, begins = self._sequence
        windows = np.full((len(rows), self._seq_len + 1), self._tokenizer.end_of_text, dtype=np.int64)
        starts = []
        for window, row in zip(windows, rows, strict=True):
            at = row * self._seq_len
            piece = tokens[at : at + len(window)]
            window[: len(piece)] = piece
            inside = begins[np.searchsorted(begins, at, side="right") :]
            starts.append((inside[: np.searchsorted(inside, at + len(window))] - at).tolist())
        batch = assemble(
            windows,
            starts,
            document_mask=self._config.document_mask,
            reset_positions=self._config.reset_positions,
        )
        for labels, row in zip(batch.labels, rows, strict=True):
            labels[max(0, len(tokens) - 1 - row * self._seq_len) :] = IGNORE_INDEX
        return batch


class _Texts:
    """The documents to evaluate on; each iteration reads them again. Raises UserError where there are none."""

    def __init__(self, config: DataConfig) -> None:
        self._limit = config.validation_documents
        self._fraction = 1.0
        own = build_validation_source(config)
        self._source = build_source(config) if own is None else own
        if own is None:
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
            self._source = held_out_part(self._source, config.validation_fraction)
        elif config.validation_documents is None:
            raise UserError("There is no end to what would be evaluated on.", [unlimited_split(config)])
        else:
            self._fraction = config.validation_fraction

    def _streamed(self, source: StreamingSource) -> Iterator[str]:
        for part in range(source.parts):
            yield from (text for text in source.open(part, None) if text and place(text) < self._fraction)


def _empty(config: DataConfig) -> UserError:
    reason = "the documents to evaluate on hold no text"
    remedy = "a larger data.validation_fraction, or training.evaluate_every=0 to go without evaluation"
    if config.validation_split is not None:
        violation = Violation("data.validation_split", config.validation_split, reason, "another split")
    else:
        violation = Violation("data.validation_fraction", config.validation_fraction, reason, remedy)
    return UserError("There is nothing to evaluate on.", [violation])
