"""The endless stream of tokenized documents of one virtual shard, over a source that streams.

With P parts and V shards: where P >= V, shard s reads the parts at places s, s + V, ... of each epoch's order. Where
P < V, in every epoch the shards at equal places (mod P) share a part and take turns at its documents; each reads all
of it. A shard whose turn never comes in a short part takes all of that part, so that every shard always has rows.

Documents are shuffled within blocks of `shuffle_buffer`: a block needs no state but the reader's at its start,
so a resume reads one block again and goes on exactly.
"""

from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.permutation import Permutation
from titan_exp.data.sources.base import StreamingSource
from titan_exp.data.tokenizers.base import Tokenizer
from titan_exp.data.validation_split import unit_hash
from titan_exp.data.virtual_shards.epoch_shuffle import EpochShuffle
from titan_exp.data.virtual_shards.indexed_stream import encode_document
from titan_exp.data.virtual_shards.thread_pool import DaemonThreadPool

_MOST_EMPTY_PARTS = 1_000


@dataclass(frozen=True)
class StreamSpec:
    """What the shards of a streamed corpus have in common."""

    source: StreamingSource
    tokenizer: Tokenizer
    order: EpochShuffle
    """Order of the source's parts."""
    seed: int
    shards: int
    """Virtual shards of the whole run."""
    shuffle_buffer: int
    """Documents in a block."""
    held_out: float
    """Share of documents, by hash of their text, that are never trained on."""


@dataclass(frozen=True)
class _BlockStart:
    """Where a block begins."""

    epoch: int = 0
    part: int = 0
    """Parts finished in this epoch."""
    seen: int = 0
    """Documents of the present part before the block, those of shards that share the part included."""
    alone: bool = False
    """The shard takes the whole part, because its turn never comes in it."""
    reader: Mapping[str, Any] | None = None
    """The reader's state; None at the beginning of the part."""


@dataclass(frozen=True)
class _Block:
    begin: dict[str, Any]
    """Its `_BlockStart`, as JSON's types."""
    texts: list[str]


class BlockShuffledStream:
    """A `DocumentStream` whose position is where its block begins, and `document`, a number within the block."""

    start = 0.0

    def __init__(self, corpus: StreamSpec, pool: DaemonThreadPool, shard: int) -> None:
        self._corpus = corpus
        self._pool = pool
        self._shard = shard
        parts, shards = corpus.source.parts, corpus.shards
        self._parts = len(range(shard, parts, shards)) or 1
        if parts >= shards:
            self._turn, self._turns = 0, 1
        else:
            self._turn, self._turns = shard // parts, len(range(shard % parts, shards, parts))
        self._go_to(_BlockStart(), 0)

    def prepare(self) -> None:
        """Have the pool read the next block, so that all shards wait for their first one together."""
        if self._next is None:
            blocks = self._blocks
            self._next = self._pool.submit(lambda: next(blocks))

    def tokens(self) -> np.ndarray:
        """Tokens of the present document and its end-of-text."""
        if self._tokens is None:
            block = self._present_block()
            self._tokens = encode_document(block.texts[self._document], self._corpus.tokenizer)
        return self._tokens

    def advance(self) -> None:
        """Go to the next document."""
        block = self._present_block()
        self._document += 1
        self._tokens = None
        if self._document == len(block.texts):
            self._block, self._document = None, 0

    def position(self) -> dict[str, Any]:
        """Where the block begins, and the document's number in it."""
        return {**self._present_block().begin, "document": self._document}

    def seek(self, position: Mapping[str, Any] | None) -> None:
        """Go to a position of this shard, or to its beginning."""
        if position is None:
            self._go_to(_BlockStart(), 0)
        else:
            self._go_to(
                _BlockStart(**{field.name: position[field.name] for field in fields(_BlockStart)}), position["document"]
            )

    def passes(self, position: Mapping[str, Any]) -> float:
        """Parts finished until `position`, as passes over the corpus (its length is unknown)."""
        return position.get("epoch", 0) + position.get("part", 0) / self._parts

    def _go_to(self, begin: _BlockStart, document: int) -> None:
        self._blocks = self._read_blocks(begin)
        self._block: _Block | None = None
        self._next: Future[_Block] | None = None
        self._document = document
        self._tokens: np.ndarray | None = None

    def _present_block(self) -> _Block:
        if self._block is None:
            self.prepare()
            assert self._next is not None
            self._block, self._next = self._next.result(), None
            self.prepare()
        return self._block

    def _read_blocks(self, at: _BlockStart) -> Iterator[_Block]:
        """Blocks for ever. Runs in the pool's threads, one task of a shard at a time."""
        empty = 0
        while True:
            found, seen = yield from self._part_blocks(at)
            empty = 0 if found else empty + 1
            if empty > _MOST_EMPTY_PARTS:
                raise UserError(f"The corpus has no text to train on: {empty} parts in a row hold none.")
            if seen and not found and not at.alone:
                at = replace(at, alone=True)
            elif at.part + 1 < self._parts:
                at = _BlockStart(at.epoch, at.part + 1)
            else:
                at = _BlockStart(at.epoch + 1)

    def _part_blocks(self, at: _BlockStart) -> Generator[_Block, None, tuple[bool, int]]:
        """The blocks of one part; returns whether there was one, and how many documents the part holds."""
        corpus = self._corpus
        turn, turns = (0, 1) if at.alone else (self._turn, self._turns)
        part = corpus.order.item(at.epoch, self._shard + at.part * corpus.shards)
        reader = corpus.source.open(part, at.reader)
        found = at.reader is not None
        while True:
            texts, seen = [], at.seen
            while len(texts) < corpus.shuffle_buffer and (text := next(reader, None)) is not None:
                self._pool.check_open()
                if not text or (corpus.held_out and unit_hash(text) < corpus.held_out):
                    continue
                if seen % turns == turn:
                    texts.append(text)
                seen += 1
            if texts:
                found = True
                order = Permutation(len(texts), "block", corpus.seed, at.epoch, self._shard, at.part, at.seen)
                yield _Block(asdict(at), [texts[order[number]] for number in range(len(texts))])
            if len(texts) < corpus.shuffle_buffer:
                return found, seen
            at = replace(at, seen=seen, reader=reader.state_dict())
