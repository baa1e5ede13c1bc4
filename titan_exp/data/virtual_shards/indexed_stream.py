"""The endless stream of tokenized documents of one virtual shard, over a source that can be read in any order.

With N documents and V shards: where N >= V, shard s reads the documents at places s, s + V, s + 2V, ... of each
epoch's order, so every epoch of all shards together is each document once. Where N < V, every shard reads all documents
in that order, and the shards start evenly spread around it, inside documents too, so that even one long file gives
rows that differ. Any position is reached at once, at the cost of reading its document.
"""

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.sources.base import RandomAccessSource
from titan_exp.data.tokenizers.base import Tokenizer
from titan_exp.data.virtual_shards.epoch_shuffle import EpochShuffle

_MOST_EMPTY_IN_A_ROW = 10_000


class DocumentStream(Protocol):
    """One virtual shard's documents, for ever; it stands at a document, never between two or at an empty one."""

    start: float
    """Share of the very first document that the shard leaves out, because another one starts there."""

    def prepare(self) -> None:
        """Begin to fetch what `tokens` will need, without waiting for it."""
        ...

    def tokens(self) -> np.ndarray:
        """Tokens of the present document and its end-of-text, [at least 2]."""
        ...

    def advance(self) -> None:
        """Go to the next document."""
        ...

    def position(self) -> dict[str, Any]:
        """Where the stream stands, in JSON's types, with at least the key `epoch`."""
        ...

    def seek(self, position: Mapping[str, Any] | None) -> None:
        """Go to a `position()` of a stream of the same shard and corpus; None is the beginning."""
        ...

    def passes(self, position: Mapping[str, Any]) -> float:
        """Passes over the whole corpus made if all shards are as far as this one is at `position`; 0 for `{}`."""
        ...


class TokenizedDocuments:
    """Documents of a source as tokens with an end-of-text. A document in use by several shards is held once."""

    def __init__(self, source: RandomAccessSource, tokenizer: Tokenizer) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._in_use: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens [length], end-of-text included."""
        tokens = self._in_use.get(index)
        if tokens is None:
            tokens = self._in_use[index] = encode_document(self._source[index], self._tokenizer)
        return tokens


def encode_document(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Tokens of `text` and the end-of-text token, [length + 1]."""
    tokens = tokenizer.encode(text)
    return np.append(tokens, np.asarray(tokenizer.end_of_text, dtype=tokens.dtype))


class IndexedStream:
    """A `DocumentStream` whose position is `epoch` and `document`, the number of documents read in that epoch."""

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

    def prepare(self) -> None:
        """Nothing: a document is read when its turn comes."""

    def tokens(self) -> np.ndarray:
        """Tokens of the present document and its end-of-text."""
        if self._tokens is None:
            self._tokens = self._read()
        return self._tokens

    def advance(self) -> None:
        """Go to the next document, into the next epoch after the last."""
        self.tokens()
        self._next()
        self._tokens = None

    def position(self) -> dict[str, Any]:
        """`epoch` and `document` of the present document."""
        self.tokens()  # which passes over empty documents
        return {"epoch": self._epoch, "document": self._document}

    def seek(self, position: Mapping[str, Any] | None) -> None:
        """Go to a position of this shard, or to its beginning."""
        self._epoch, self._document = (position["epoch"], position["document"]) if position else (0, 0)
        self._tokens = None

    def passes(self, position: Mapping[str, Any]) -> float:
        """Documents read until `position`, as passes over the corpus."""
        read = position.get("epoch", 0) * self._length + position.get("document", 0)
        return read * self._shards / self._order.items

    def _read(self) -> np.ndarray:
        for _ in range(_MOST_EMPTY_IN_A_ROW):
            place = self._shard + self._document * self._step
            tokens = self._documents[self._order.item(self._epoch, place)]
            if len(tokens) > 1:
                return tokens
            self._next()
        raise UserError(f"The corpus has no text: {_MOST_EMPTY_IN_A_ROW} documents in a row are empty.")

    def _next(self) -> None:
        self._document += 1
        if self._document == self._length:
            self._epoch, self._document = self._epoch + 1, 0
