"""Sampler interface: layout-invariant order of packed rows, and one data rank's share of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from titan_exp.data.batch import MicroBatch

SamplerState = dict[str, dict[str, Any]]
"""JSON-serializable positions by name; each data rank holds a part of the run's."""

NextRow = Callable[[Any], tuple[list[int], SamplerState]]
"""Fills a row of a `RowBuffer` with the next one, such as a window [seq_len + 1] of tokens; returns its document starts
(each in 1..seq_len; none for other rows) and the changed positions."""


class RowBuffer(Protocol):
    """Rows of a micro-batch, which iterating yields to be filled."""

    def __iter__(self) -> Iterator[Any]:
        """Rows to fill, in order."""
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
        batch size. Raises UserError if positions are missing or belong to different rows."""
        ...

    def open(self, state: SamplerState) -> NextRow:
        """Open a reader of this rank's rows at its positions."""
        ...

    def state_at(self, rows: int) -> SamplerState | None:
        """Positions after `rows` rows of the run (a multiple of dp); None if they require reading."""
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
