"""Validation data loader: one pass over the validation split per iteration, in layout-invariant rows.

The split's documents, in source order and limited by `data.validation_documents`, form one sequence of tokens; data
rank n mod dp takes row n. Each store of a mixture has its own sequence and its own loss.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any

import numpy as np

from titan_exp.config.data_files import unit_hash, unlimited_split
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.run import DataConfig
from titan_exp.config.schema.data_sets import HOLD_TEXT, source_member
from titan_exp.config.schema.foreign_code import described
from titan_exp.data.batch import Batch, collate
from titan_exp.data.source_check import validation_subset
from titan_exp.data.sources import base
from titan_exp.data.token_store import StoredText, TokenSequence, TokenSplit, open_split, stored_text, tokens_of_a_part
from titan_exp.data.tokenizers import Tokenizer, build_tokenizer, encode_document
from titan_exp.ops.cross_entropy import IGNORE_INDEX


class ValidationLoader:
    """Validation batches [micro_batch_size, seq_len] of one data rank. All ranks yield the same number of batches, and
    each row of the split is on exactly one rank; padding rows have no labels. Text is tokenized once and its tokens
    stay in memory. With `all_documents`, the split is the whole source, including training documents. Raises UserError
    if the split is empty, or held out of a stream without a limit."""

    def __init__(
        self,
        data: DataConfig,
        seq_len: int,
        *,
        dp_rank: int,
        dp_degree: int,
        micro_batch_size: int,
        all_documents: bool = False,
    ) -> None:
        member = partial(source_member, data.source)
        self.further_metrics = member("further_metrics") or (lambda sources, row, evaluate: {})
        """Function that returns more metrics, from `sources`, their metrics, and an evaluation of batches by name."""
        self._data = data
        shard = {"dp_rank": dp_rank, "dp_degree": dp_degree, "micro_batch_size": micro_batch_size}
        if (batches := member("validation_batches")) is not None:
            self.sources: Mapping[str, Any] = batches(data, **shard, all_documents=all_documents)
            return
        splits = (member("validation_splits") or _text_split)(data, all_documents)
        self.sources = {name: SplitBatches(open_, data, seq_len, **shard) for name, open_ in splits.items()}
        """Batches by source of a mixture, or by part of the evaluation; the name of a single source is empty."""

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text by token id [vocab]; None if the source holds no text, or stores whose copy of the tokenizer
        cannot be read, which training does without."""
        if (holds := described(self._data.source).holds) not in HOLD_TEXT:
            return None
        try:
            return build_tokenizer(self._data).token_bytes()
        except UserError:
            if holds == "tokens":
                return None
            raise

    def __len__(self) -> int:
        """Number of batches, equal on all ranks."""
        return sum(map(len, self.sources.values()))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.sources.values())


class SplitBatches:
    """Batches of one sequence for one data rank; `open_` is called on first use."""

    def __init__(
        self,
        open_: Callable[[], TokenSequence],
        data: DataConfig,
        seq_len: int,
        *,
        dp_rank: int,
        dp_degree: int,
        micro_batch_size: int,
    ) -> None:
        self._open, self._data, self._seq_len = open_, data, seq_len
        self._dp_rank, self._dp_degree, self._micro_batch_size = dp_rank, dp_degree, micro_batch_size

    def __len__(self) -> int:
        """Number of batches, equal on all ranks."""
        rows = math.ceil((self._sequence.tokens - 1) / self._seq_len)
        return math.ceil(rows / (self._micro_batch_size * self._dp_degree))

    def __iter__(self) -> Iterator[Batch]:
        for batch in range(len(self)):
            first = self._dp_rank + batch * self._micro_batch_size * self._dp_degree
            yield self._batch([first + row * self._dp_degree for row in range(self._micro_batch_size)])

    @cached_property
    def _sequence(self) -> TokenSequence:
        return self._open()

    def _batch(self, rows: list[int]) -> Batch:
        data, sequence = self._data, self._sequence
        windows = np.zeros((len(rows), self._seq_len + 1), dtype=np.int64)
        starts = []
        for window, row in zip(windows, rows, strict=True):
            begin = row * self._seq_len
            length = max(0, min(len(window), sequence.tokens - begin))
            starts.append(sequence.read(begin, window[:length]) if length else [])
        batch = collate(windows, starts, document_mask=data.document_mask, reset_positions=data.reset_positions)
        for labels, row in zip(batch.labels, rows, strict=True):
            labels[max(0, sequence.tokens - 1 - row * self._seq_len) :] = IGNORE_INDEX
        return batch


def _text_split(data: DataConfig, all_documents: bool) -> dict[str, Callable[[], TokenSequence]]:
    """Opener of a text source's validation documents, under an empty name; it uses the text's token store if training
    has made one. All documents of a text have a store of their own, which the first run makes."""
    texts, tokenizer = _ValidationTexts(data, all_documents), build_tokenizer(data)
    if all_documents and data.validation_documents is None:
        whole = replace(data, validation_fraction=0.0, validation_split=None)
        if (stored := stored_text(whole, texts.whole, tokenizer)) is not None:
            return {"": partial(_open_stored, stored, texts, tokenizer)}
    stored = stored_text(data, texts.whole, tokenizer) if texts.are_held_out else None
    if stored is None or (store := stored.find()) is None:
        return {"": partial(_tokenize, texts, tokenizer)}
    return {"": partial(open_split, TokenSplit(store, "validation"), data.validation_documents)}


def _open_stored(stored: StoredText, texts: "_ValidationTexts", tokenizer: Tokenizer) -> TokenSequence:
    with suppress(UserError):  # no folder to write to
        return open_split(TokenSplit(stored.make(), "train"), None)
    return _tokenize(texts, tokenizer)


def _tokenize(texts: "_ValidationTexts", tokenizer: Tokenizer) -> TokenSequence:
    documents = (encode_document(text, tokenizer) for text in texts)
    return tokens_of_a_part(texts.data, texts.whole, tokenizer, texts.part, documents)


class _ValidationTexts:
    """Validation documents; each iteration reads them again. Raises UserError if there are none."""

    def __init__(self, data: DataConfig, all_documents: bool) -> None:
        self.data, self._limit = data, data.validation_documents
        self._fraction = 1.0
        own = None if all_documents else base.build_validation_source(data)
        self.whole = self._source = base.build_source(data) if own is None else own
        """Source of the documents, including those to train on."""
        self.are_held_out = not all_documents and own is None
        """True if the validation documents are a part of the source's documents."""
        held_out = data.validation_fraction if self.are_held_out else None
        self.part = (held_out, None if own is None else data.validation_split, self._limit)
        """Choice of the documents."""
        if all_documents:
            _require_limit(self._source, data)
        elif own is None and data.validation_fraction == 0:
            remedy = "use data.validation_fraction=0.02, or evaluation.every=0 to train without evaluation"
            violation = Violation("data.validation_fraction", 0.0, "this fraction holds out no documents", remedy)
            raise UserError("There is nothing to evaluate on.", [violation])
        elif own is None and isinstance(self._source, base.RandomAccessSource):
            self._source = validation_subset(self._source, data.validation_fraction)
        elif own is None:
            _require_limit(self._source, data)
            self._fraction = data.validation_fraction
        if next(iter(self), None) is None:
            raise self._no_text(data)

    def __iter__(self) -> Iterator[str]:
        source = self._source
        if isinstance(source, base.RandomAccessSource):
            texts = (text for text in map(source.__getitem__, range(len(source))) if text)
        else:
            texts = self._stream(source)
        return islice(texts, self._limit)

    def _stream(self, source: base.StreamingSource, fraction: float | None = None) -> Iterator[str]:
        fraction = self._fraction if fraction is None else fraction
        for part in range(source.parts):
            yield from (text for text in source.open(part, None) if text and unit_hash(text) < fraction)

    def _no_text(self, data: DataConfig) -> UserError:
        """Make the error for a split without text: it has no documents, or they are empty."""
        source, reason = self._source, "the validation documents contain no text"
        if not isinstance(source, base.RandomAccessSource) and self._fraction < 1:
            has_text = next(self._stream(source, 1.0), None) is not None
            none_of_them = "this fraction holds out none of the documents of the stream"
            reason = none_of_them if has_text else "the stream contains no text"
        if data.validation_split is not None:
            violation = Violation("data.validation_split", data.validation_split, reason, "name another split")
        else:
            remedy = "use a larger data.validation_fraction, or evaluation.every=0 to train without evaluation"
            violation = Violation("data.validation_fraction", data.validation_fraction, reason, remedy)
        return UserError("There is nothing to evaluate on.", [violation])


def _require_limit(source: base.Source, data: DataConfig) -> None:
    if not isinstance(source, base.RandomAccessSource) and data.validation_documents is None:
        raise UserError("The validation split of a stream has no limit.", [unlimited_split(data)])
