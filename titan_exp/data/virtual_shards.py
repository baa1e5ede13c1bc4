"""Virtual shards: streams of documents, read in blocks whose order is shuffled.

With P parts and V shards: if P >= V, shard s reads the parts at ranks s, s + V, ... of each epoch's order. If P < V,
shards at equal ranks (mod P) share a part in every epoch and alternate on its documents; each reads all of it. A shard
without documents in a short part takes the whole part, so that every shard always has rows.

Documents are shuffled within blocks of `shuffle_buffer`. A block's state is the reader's state at its start, so an
exact resume re-reads one block.
"""

import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np

from titan_exp.config.data_files import unit_hash
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.batch import Permutation
from titan_exp.data.sources.base import RandomAccessSource, StreamingSource
from titan_exp.data.tokenizers import Tokenizer, encode_document


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

    def __init__(self, stream: "DocumentStream", seq_len: int) -> None:
        self._stream, self._seq_len, self._rows = stream, seq_len, 0
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
        self._source, self._tokenizer = source, tokenizer
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
    """Endless stream of a shard's tokenized documents, positioned at a non-empty one. A position has `epoch` and
    `document`, the number of documents read in that epoch."""

    def __init__(self, documents: TokenizedDocuments, order: EpochShuffle, *, shard: int, shards: int) -> None:
        self._documents, self._order = documents, order
        self._shard, self._shards = shard, shards
        total = order.items
        # `start` is the fraction of the first document that is skipped, because another shard starts there.
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


Result = TypeVar("Result")
_Task = tuple[Callable[[], object], "Future"] | None
_JOIN_TIMEOUT_SECONDS = 2.0


class DaemonThreadPool:
    """Thread pool that runs tasks in daemon threads. `close` cancels queued tasks; running tasks poll `check_open`."""

    def __init__(self, threads: int) -> None:
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._closed = threading.Event()
        workers = [threading.Thread(target=_work, args=(self._tasks,), daemon=True) for _ in range(threads)]
        self.close = weakref.finalize(self, _stop, self._tasks, self._closed, workers)
        """Stop the threads; idempotent."""
        for worker in workers:
            worker.start()

    def submit(self, task: "Callable[[], Result]") -> "Future[Result]":
        """Run `task` in a thread; the future is cancelled if the pool closes first."""
        future: Future[Result] = Future()
        if self._closed.is_set():
            future.cancel()
        else:
            self._tasks.put((task, future))
        return future

    def check_open(self) -> None:
        """Raise CancelledError once the pool is closed; tasks call it regularly."""
        if self._closed.is_set():
            raise CancelledError


def _work(tasks: "SimpleQueue[_Task]") -> None:
    while (job := tasks.get()) is not None:
        task, future = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
        del job, task, future  # an idle thread must not keep references to a finished task's data


def _stop(tasks: "SimpleQueue[_Task]", closed: threading.Event, workers: list[threading.Thread]) -> None:
    closed.set()
    with suppress(Empty):
        while True:
            if (job := tasks.get_nowait()) is not None:
                job[1].cancel()
    for _ in workers:
        tasks.put(None)
    for worker in workers:
        if worker is not threading.current_thread():  # a worker may hold the last reference to the pool
            worker.join(_JOIN_TIMEOUT_SECONDS / len(workers))


_MAX_EMPTY_PARTS = 1_000


@dataclass(frozen=True)
class StreamSpec:
    """Stream settings shared by all virtual shards."""

    source: StreamingSource
    tokenizer: Tokenizer
    order: EpochShuffle  # order of the source's parts
    seed: int
    shards: int  # number of virtual shards of the run
    shuffle_buffer: int  # number of documents per block
    held_out: float  # held-out fraction of documents, by hash of their text


@dataclass(frozen=True)
class _BlockStart:
    epoch: int = 0
    part: int = 0  # number of parts finished in this epoch
    seen: int = 0  # number of documents of the part before the block, including other shards' documents
    alone: bool = False  # True if the shard takes the whole part, because it would otherwise have no documents in it
    reader: Mapping[str, Any] | None = None  # reader state; None at the beginning of the part


@dataclass(frozen=True)
class _Block:
    start: dict[str, Any]  # JSON-serializable `_BlockStart`
    texts: list[str]


class BlockShuffledStream:
    """`DocumentStream` whose position is the start of a block and `document`, the index within the block."""

    start = 0.0

    def __init__(self, spec: StreamSpec, pool: DaemonThreadPool, shard: int) -> None:
        self._spec, self._pool, self._shard = spec, pool, shard
        parts, shards = spec.source.parts, spec.shards
        self._parts = len(range(shard, parts, shards)) or 1
        if parts >= shards:
            self._turn, self._turns = 0, 1
        else:
            self._turn, self._turns = shard // parts, len(range(shard % parts, shards, parts))
        self.seek(None)

    def prefetch(self) -> None:
        """Start reading the next block in the pool, so that all shards load their first blocks concurrently."""
        if self._next is None:
            blocks = self._blocks
            self._next = self._pool.submit(lambda: next(blocks))

    def tokens(self) -> np.ndarray:
        """Tokens of the current document, including its end-of-text."""
        if self._tokens is None:
            self._tokens = encode_document(self._current_block().texts[self._document], self._spec.tokenizer)
        return self._tokens

    def advance(self) -> None:
        """Move to the next document."""
        block = self._current_block()
        self._document += 1
        self._tokens = None
        if self._document == len(block.texts):
            self._block, self._document = None, 0

    def position(self) -> dict[str, Any]:
        """Start of the block, and the document's index within it."""
        return {**self._current_block().start, "document": self._document}

    def seek(self, position: Mapping[str, Any] | None) -> None:
        """Move to a position of this shard, or to its beginning."""
        position = position or {"document": 0}
        start = _BlockStart(**{name: value for name, value in position.items() if name in _BlockStart.__annotations__})
        self._blocks = self._read_blocks(start)
        self._block: _Block | None = None
        self._next: Future[_Block] | None = None
        self._document: int = position["document"]
        self._tokens: np.ndarray | None = None

    def epochs(self, position: Mapping[str, Any]) -> float:
        """Number of parts finished at `position`, in epochs over the corpus, whose length is unknown."""
        return position.get("epoch", 0) + position.get("part", 0) / self._parts

    def _current_block(self) -> _Block:
        if self._block is None:
            self.prefetch()
            assert self._next is not None
            self._block, self._next = self._next.result(), None
            self.prefetch()
        return self._block

    def _read_blocks(self, start: _BlockStart) -> Iterator[_Block]:
        """Yield blocks endlessly; the pool's threads read them, one task per shard at a time."""
        empty = 0
        while True:
            found, seen = yield from self._read_part(start)
            empty = 0 if found else empty + 1
            if empty > _MAX_EMPTY_PARTS:
                raise UserError(f"The corpus has no text to train on: {empty} parts in a row are empty.")
            if seen and not found and not start.alone:
                start = replace(start, alone=True)
            elif start.part + 1 < self._parts:
                start = _BlockStart(start.epoch, start.part + 1)
            else:
                start = _BlockStart(start.epoch + 1)

    def _read_part(self, start: _BlockStart) -> Generator[_Block, None, tuple[bool, int]]:
        """Yield the blocks of one part; returns True if it has any, and the number of documents in the part."""
        spec = self._spec
        turn, turns = (0, 1) if start.alone else (self._turn, self._turns)
        part = spec.order.item(start.epoch, self._shard + start.part * spec.shards)
        reader = spec.source.open(part, start.reader)
        found = start.reader is not None
        while True:
            texts, seen = [], start.seen
            while len(texts) < spec.shuffle_buffer and (text := next(reader, None)) is not None:
                self._pool.check_open()
                if not text or (spec.held_out and unit_hash(text) < spec.held_out):
                    continue
                if seen % turns == turn:
                    texts.append(text)
                seen += 1
            if texts:
                found = True
                order = Permutation(len(texts), "block", spec.seed, start.epoch, self._shard, start.part, start.seen)
                yield _Block(asdict(start), [texts[order[index]] for index in range(len(texts))])
            if len(texts) < spec.shuffle_buffer:
                return found, seen
            start = replace(start, seen=seen, reader=reader.state_dict())


DocumentStream = IndexedStream | BlockShuffledStream
