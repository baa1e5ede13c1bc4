"""Document stream over a random-access source.

With N documents and V shards: if N >= V, shard s reads the documents at ranks s, s + V, s + 2V, ... of each epoch's
order, so that all shards together read each document once per epoch. If N < V, every shard reads all documents in that
order, starting at evenly spread offsets, also within documents, so that even one long file gives different rows.
Seeking reads one document.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.sources.base import RandomAccessSource
from titan_exp.data.tokenizers.base import Tokenizer, encode_document
from titan_exp.data.virtual_shards.epoch_shuffle import EpochShuffle

_MAX_EMPTY_DOCUMENTS = 10_000


class TokenizedDocuments:
    """Documents as tokens with end-of-text. A document used by several shards is in memory once."""

    def __init__(self, source: RandomAccessSource, tokenizer: Tokenizer) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._in_use: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens [length] including the end-of-text."""
        tokens = self._in_use.get(index)
        if tokens is None:
            tokens = self._in_use[index] = encode_document(self._source[index], self._tokenizer)
        return tokens


class IndexedStream:
    """`DocumentStream` with position `epoch` and `document`, the number of documents read in that epoch."""

    def __init__(self, documents: TokenizedDocuments, order: EpochShuffle, *, shard: int, shards: int) -> None:
        self._documents = documents
        self._order = order
        self._shard = shard
        self._shards = shards
        total = order.items
        if total >= shards:
            self._step, self._length, self.start = shards, len(range(shard, total, shards)), 0.0
        else:
            self._step, self._length, self.start = 1, total, (shard // total) / -(-shards // total)
        self._epoch = self._document = 0
        self._tokens: np.ndarray | None = None

    def prefetch(self) -> None:
        """Do nothing: documents are read on demand."""

    def tokens(self) -> np.ndarray:
        """Tokens of the current document and its end-of-text."""
        if self._tokens is None:
            self._tokens = self._read()
        return self._tokens

    def advance(self) -> None:
        """Move to the next document, or to the next epoch after the last."""
        self.tokens()
        self._step_forward()
        self._tokens = None

    def position(self) -> dict[str, Any]:
        """`epoch` and `document` of the current document."""
        self.tokens()  # skips empty documents
        return {"epoch": self._epoch, "document": self._document}

    def seek(self, position: Mapping[str, Any] | None) -> None:
        """Move to a position of this shard, or to its beginning."""
        self._epoch, self._document = (position["epoch"], position["document"]) if position else (0, 0)
        self._tokens = None

    def epochs(self, position: Mapping[str, Any]) -> float:
        """Documents read at `position`, in epochs over the corpus."""
        read = position.get("epoch", 0) * self._length + position.get("document", 0)
        return read * self._shards / self._order.items

    def _read(self) -> np.ndarray:
        for _ in range(_MAX_EMPTY_DOCUMENTS):
            rank = self._shard + self._document * self._step
            tokens = self._documents[self._order.item(self._epoch, rank)]
            if len(tokens) > 1:
                return tokens
            self._step_forward()
        raise UserError(f"The corpus has no text: {_MAX_EMPTY_DOCUMENTS} documents in a row are empty.")

    def _step_forward(self) -> None:
        self._document += 1
        if self._document == self._length:
            self._epoch, self._document = self._epoch + 1, 0
