"""Streams of documents: read in order, packed into rows, shuffled by epoch, found by index."""

import weakref
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.sampler import Permutation
from titan_exp.data.sources.base import RandomAccessSource
from titan_exp.data.tokenizers import Tokenizer, encode_document


class DocumentStream(Protocol):
    """Endless stream of one virtual shard's tokenized documents, positioned at a non-empty document."""

    start: float
    """Fraction of the shard's first document that is skipped, because another shard starts there."""

    def prefetch(self) -> None:
        """Start fetching the current document without waiting for it."""
        ...

    def tokens(self) -> np.ndarray:
        """Tokens of the current document, including its end-of-text; at least 2."""
        ...

    def advance(self) -> None:
        """Move to the next document."""
        ...

    def position(self) -> dict[str, Any]:
        """JSON-serializable position, with at least the key `epoch`."""
        ...

    def seek(self, position: Mapping[str, Any] | None) -> None:
        """Move to a `position()` of the same shard and corpus, or to the beginning (None)."""
        ...

    def epochs(self, position: Mapping[str, Any]) -> float:
        """Epochs over the whole corpus if all shards have progressed as far as this one at `position`; 0 for `{}`."""
        ...


class EpochShuffle:
    """Shuffled order of `items` items in every epoch."""

    def __init__(self, items: int, seed: int) -> None:
        self.items = items
        # Shards reach the end of an epoch at different times, so that a few epochs are in use simultaneously.
        self._epoch = lru_cache(maxsize=8)(lambda epoch: Permutation(items, "order", seed, epoch))

    def item(self, epoch: int, rank: int) -> int:
        """Item at `rank` (modulo the number of items) of the epoch's order."""
        return self._epoch(epoch)[rank % self.items]


class PackedStream:
    """Endless packed rows of one virtual shard. The state is the position of the next row's first token."""

    def __init__(self, stream: DocumentStream, seq_len: int) -> None:
        self._stream = stream
        self._seq_len = seq_len
        self._rows = 0
        self._offset: int | None = None  # number of tokens into the current document; None before the first read

    def next_row(self, window: np.ndarray) -> list[int]:
        """Fill `window` [seq_len + 1] with the next row; returns its document starts (each in 1..seq_len)."""
        tokens, offset = self._stream.tokens(), self._begin()
        filled, starts = 0, []
        while True:
            chunk = tokens[offset : offset + len(window) - filled]
            window[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
            if filled == len(window):
                break
            self._stream.advance()
            tokens, offset = self._stream.tokens(), 0
            starts.append(filled)
        self._offset = offset + len(chunk) - 1  # the last token is the next row's first
        self._rows += 1
        return starts

    def skip_row(self) -> None:
        """Move past the next row without copying its tokens."""
        offset = self._begin() + self._seq_len
        while offset >= (length := len(self._stream.tokens())):
            offset -= length
            self._stream.advance()
        self._offset = offset
        self._rows += 1

    def state_dict(self) -> dict[str, Any]:
        """JSON-serializable position: `rows` read, and the stream position and `offset` of the next row."""
        if self._offset is None:
            return {"rows": 0}
        return {"rows": self._rows, "offset": self._offset, **self._stream.position()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state_dict()` of the same shard; `{"rows": 0}` is the beginning."""
        self._rows, self._offset = state["rows"], state.get("offset")
        self._stream.seek(None if self._offset is None else state)

    def _begin(self) -> int:
        """Offset of the next row's first token in the current document."""
        return int(len(self._stream.tokens()) * self._stream.start) if self._offset is None else self._offset


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
