"""Micro-batches of every kind, packed rows, and the order of samples: a keyed permutation and a rank's sampler."""

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from titan_exp.config.errors.user_error import UserError
from titan_exp.ops.cross_entropy import IGNORE_INDEX


@runtime_checkable
class SequencePart(Protocol):
    """Part of every sequence that a context-parallel rank computes."""

    def take(self, whole: Tensor, /) -> Tensor:
        """Take this rank's tokens of a tensor [rows, seq, ...]."""
        ...

    def positions(self, tokens: Tensor, /) -> Tensor:
        """Positions of this rank's tokens in the whole sequence, for `tokens` [rows, seq]."""
        ...


class Inputs(NamedTuple):
    """Arguments of a model's `forward`."""

    positional: tuple[Tensor | None, ...]
    """Positional arguments."""
    named: dict[str, Tensor | None]
    """Named arguments."""


class MicroBatch(ABC):
    """Rows of a micro-batch, as tensors whose first dim is the row."""

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All tensors of the batch."""

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to every tensor of the batch."""

    @abstractmethod
    def inputs(self, hidden: Tensor | None = None) -> "Inputs":
        """Arguments of a model's `forward`; with `hidden` states, those of a later pipeline stage."""

    @abstractmethod
    def sharded(self, part: SequencePart) -> Self:
        """Take this rank's part of every sequence."""

    def to(self, device: torch.device | str) -> Self:
        """Copy the batch to `device`, asynchronously if it is pinned."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Copy the batch to page-locked memory. Needs CUDA."""
        return self.map(lambda tensor: tensor.pin_memory())


@dataclass(frozen=True)
class Batch(MicroBatch):
    """Rows of packed documents. Every tensor is int64 of shape [rows, seq]."""

    tokens: Tensor
    labels: Tensor
    """Next-token targets; `IGNORE_INDEX` excludes a position from the loss."""
    positions: Tensor | None
    """Position of each token within its document in this row; None if positions count through the row."""
    documents: Tensor | None
    """Index of each token's document within the row; None if attention crosses document boundaries."""
    further: tuple["Batch", ...] = ()
    """Batches of the tokens 1, 2, ... places ahead with their labels, for multi-token prediction; positions and
    documents are this batch's."""

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the batch."""
        further = [tensor for batch in self.further for tensor in batch.tensors]
        own = (self.tokens, self.labels, self.positions, self.documents)
        return [*(tensor for tensor in own if tensor is not None), *further]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to every tensor of the batch."""
        optional = (self.positions, self.documents)
        positions, documents = (None if tensor is None else function(tensor) for tensor in optional)
        further = tuple(batch.map(function) for batch in self.further)
        return Batch(function(self.tokens), function(self.labels), positions, documents, further)

    def inputs(self, hidden: Tensor | None = None) -> Inputs:
        """Arguments: tokens or hidden states, positions, documents."""
        return Inputs((self.tokens if hidden is None else hidden, self.positions, self.documents), {})

    def sharded(self, part: SequencePart) -> "Batch":
        """Take this rank's tokens, with positions, because a token's index in the part is not its position."""
        shard = self.map(part.take)
        return shard if shard.positions is not None else replace(shard, positions=part.positions(self.tokens))

    def with_further(self, depth: int) -> "Batch":
        """Return this batch of whole rows with the tokens up to `depth` places ahead. Token i + k predicts token i + k
        + 1. If documents are masked, both must be in the document of token i. The last k tokens of a row have no label,
        because their target lies beyond it; the row's last token stands in for the tokens after it, and no counted
        prediction depends on it."""
        return replace(self, further=tuple(self._ahead(places) for places in range(1, depth + 1)))

    def _ahead(self, places: int) -> "Batch":
        tokens = torch.cat((self.tokens[:, places:], self.tokens[:, -1:].expand(-1, places)), dim=1)
        labels = torch.full_like(self.labels, IGNORE_INDEX)
        labels[:, :-places] = self.labels[:, places:]
        if self.documents is not None:
            labels[:, :-places][self.documents[:, places:] != self.documents[:, :-places]] = IGNORE_INDEX
        return Batch(tokens, labels, None, None)


def collate(
    windows: np.ndarray, starts: Sequence[Sequence[int]], *, document_mask: bool, reset_positions: bool
) -> Batch:
    """Collate `windows` [rows, seq + 1], with document starts `starts[row]` (each in 1..seq), into a batch. With
    `document_mask`, the last token of a document does not predict the first token of the next one."""
    rows, length = windows.shape
    tokens, labels = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
    if not (document_mask or reset_positions):
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), None, None)
    begins = np.zeros((rows, length), dtype=np.int64)
    for row, offsets in enumerate(starts):
        begins[row, list(offsets)] = 1
    documents = positions = None
    if document_mask:
        labels[begins[:, 1:] == 1] = IGNORE_INDEX
        documents = torch.from_numpy(begins[:, :-1].cumsum(axis=1))
    if reset_positions:
        index = np.arange(length - 1)
        latest = np.maximum.accumulate(np.where(begins[:, :-1] == 1, index, 0), axis=1)
        positions = torch.from_numpy(index - latest)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), positions, documents)


SamplerState = dict[str, dict[str, Any]]
"""JSON-serializable positions by name; each data rank holds a part of the run's."""

NextRow = Callable[[Any], tuple[list[int], SamplerState]]
"""Fills a row of a `RowBuffer`, such as a window [seq_len + 1] of tokens, with the next row. Returns its document
starts (each in 1..seq_len; none for other rows) and the changed positions."""


class RowBuffer(Protocol):
    """Iterates over the empty rows of a micro-batch; the caller fills them."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rows to fill, in order."""
        ...

    def collate(self, starts: Sequence[Sequence[int]], /) -> MicroBatch:
        """Batch of the filled rows, from their document starts."""
        ...


class Sampler(Protocol):
    """Rows of one data rank: from row R of the run, rank r of dp takes the rows R + r, R + r + dp, and so on. Optional
    member: `rows(count) -> RowBuffer`, for rows other than windows of tokens."""

    corpus: dict[str, Any]
    """Identity of the data that positions refer to, equal on all ranks; keyed by config keys for error messages."""
    initial_state: SamplerState
    """Positions before the first row."""

    def restrict(self, states: Mapping[str, dict[str, Any]]) -> SamplerState:
        """Select this rank's positions from all ranks', saved at the end of a global batch under any dp degree and any
        batch size. Raises UserError if positions are missing or are of different rows."""
        ...

    def open(self, state: SamplerState) -> NextRow:
        """Open a reader of this rank's rows at its positions."""
        ...

    def state_at(self, rows: int) -> SamplerState | None:
        """Positions after `rows` rows of the run (a multiple of dp); None if only reading can tell them."""
        ...

    def source_name(self, row: int) -> str:
        """Source of a row of the run; empty for a single source."""
        ...

    def epochs(self, state: SamplerState) -> dict[str, float]:
        """Epochs completed per source name, and over all sources under the empty name."""
        ...

    def close(self) -> None:
        """Stop background threads."""
        ...


class RowSampler(ABC):
    """`Sampler` that reads rows by number. Its position counts the rows of all ranks, which advance together."""

    state_name: ClassVar[str]
    """Name of the position in the state."""
    store: ClassVar[str]
    """Kind of store, for error messages."""

    def __init__(self, corpus: dict[str, Any], dp_rank: int, dp_degree: int) -> None:
        self.corpus = corpus
        self.initial_state = self.state_at(0)
        self._dp_rank, self._dp_degree = dp_rank, dp_degree

    @abstractmethod
    def read(self, row: int, target: Any, /) -> list[int]:
        """Fill `target` with a row of the run; returns its document starts."""

    def restrict(self, states: Mapping[str, dict[str, Any]]) -> SamplerState:
        """Return the single position, shared by all ranks."""
        if self.state_name not in states:
            raise UserError(f"The checkpoint has no position in a {self.store}.")
        return self.state_at(states[self.state_name]["rows"])

    def open(self, state: SamplerState) -> NextRow:
        """Open a reader of this rank's rows."""
        rows = state[self.state_name]["rows"]

        def next_row(target: Any) -> tuple[list[int], SamplerState]:
            nonlocal rows
            row = rows + self._dp_rank
            rows += self._dp_degree
            return self.read(row, target), self.state_at(rows)

        return next_row

    def state_at(self, rows: int) -> SamplerState:
        """Position after `rows` rows."""
        return {self.state_name: {"rows": rows}}

    def source_name(self, row: int) -> str:
        """Empty, because there is a single source."""
        return ""

    def close(self) -> None:  # noqa: B027
        """Do nothing, since rows are read on demand."""


_ROUNDS = 8


class Permutation:
    """Pseudorandom bijection of `range(size)`, a pure function of `size` and `key`."""

    def __init__(self, size: int, *key: object) -> None:
        assert size >= 1
        self.size = size
        self._rows = math.isqrt(size - 1) + 1
        self._columns = -(-size // self._rows)
        self._key = blake2b("/".join(map(str, key)).encode(), digest_size=32).digest()

    def __getitem__(self, index: int) -> int:
        """Image of `index`."""
        assert 0 <= index < self.size
        while True:
            row, column = divmod(index, self._columns)
            for round_ in range(0, _ROUNDS, 2):
                row = (row + self._round(round_, column)) % self._rows
                column = (column + self._round(round_ + 1, row)) % self._columns
            if (index := row * self._columns + column) < self.size:
                return index

    def _round(self, round_: int, value: int) -> int:
        digest = blake2b(struct.pack("<BQ", round_, value), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little")


def keyed_generator(seed: int, sample: int, purpose: str) -> np.random.Generator:
    """Random generator for one sample and one purpose, independent of other samples and purposes."""
    digest = blake2b(f"{seed}/{sample}/{purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
