"""Block shuffling: document stream over a streaming source, shuffled within blocks.

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
from dataclasses import asdict, dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np

from titan_exp.config.data_files import unit_hash
from titan_exp.config.errors.user_error import UserError
from titan_exp.data.sampler import Permutation
from titan_exp.data.sources.base import StreamingSource
from titan_exp.data.tokenizers import Tokenizer, encode_document
from titan_exp.data.virtual_shards.streams import EpochShuffle

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
    while True:
        try:
            job = tasks.get_nowait()
        except Empty:
            break
        if job is not None:
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
    order: EpochShuffle
    """Order of the source's parts."""
    seed: int
    shards: int
    """Number of virtual shards of the run."""
    shuffle_buffer: int
    """Number of documents per block."""
    held_out: float
    """Held-out fraction of documents, by hash of their text."""


@dataclass(frozen=True)
class _BlockStart:
    """Start position of a block."""

    epoch: int = 0
    part: int = 0
    """Number of parts finished in this epoch."""
    seen: int = 0
    """Number of documents of the part before the block, including other shards' documents."""
    alone: bool = False
    """True if the shard takes the whole part, because it would otherwise have no documents in it."""
    reader: Mapping[str, Any] | None = None
    """Reader state; None at the beginning of the part."""


@dataclass(frozen=True)
class _Block:
    start: dict[str, Any]
    """JSON-serializable `_BlockStart`."""
    texts: list[str]


class BlockShuffledStream:
    """`DocumentStream` whose position is the start of a block and `document`, the index within the block."""

    start = 0.0

    def __init__(self, spec: StreamSpec, pool: DaemonThreadPool, shard: int) -> None:
        self._spec = spec
        self._pool = pool
        self._shard = shard
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
