"""Sequence packing: a shard's documents, concatenated and cut into windows of seq_len + 1 tokens that overlap by one,
so that every token except the shard's first is predicted exactly once."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from titan_exp.data.virtual_shards.document_stream import DocumentStream


class PackedStream:
    """Endless packed rows of one virtual shard. The state is the position of the next row's first token."""

    def __init__(self, stream: DocumentStream, seq_len: int) -> None:
        self._stream = stream
        self._seq_len = seq_len
        self._rows = 0
        self._offset: int | None = None  # tokens into the current document; None before the first read

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
