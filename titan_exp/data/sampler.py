"""Order of samples: a keyed permutation, the sampler of a rank, and warnings about data."""

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, ClassVar, Protocol

import numpy as np

from titan_exp.config.errors.user_error import UserError
from titan_exp.data.batch import MicroBatch

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
    """Rows of one data rank: from row R of the run, rank r of dp takes the rows R + r, R + r + dp, and so on.

    Optional member: `rows(count) -> RowBuffer`, for rows other than windows of tokens.
    """

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
            index = self._encrypt(index)
            if index < self.size:
                return index

    def _encrypt(self, index: int) -> int:
        row, column = divmod(index, self._columns)
        for round_ in range(0, _ROUNDS, 2):
            row = (row + self._round(round_, column)) % self._rows
            column = (column + self._round(round_ + 1, row)) % self._columns
        return row * self._columns + column

    def _round(self, round_: int, value: int) -> int:
        digest = blake2b(struct.pack("<BQ", round_, value), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little")


def keyed_generator(seed: int, sample: int, purpose: str) -> np.random.Generator:
    """Random generator for one sample and one purpose, independent of other samples and purposes."""
    digest = blake2b(f"{seed}/{sample}/{purpose}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
