"""Sampler interface: layout-invariant order of packed rows, and one data rank's share of it."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

SamplerState = dict[str, dict[str, Any]]
"""JSON-serializable positions by name; each data rank holds a part of the run's."""

NextRow = Callable[[np.ndarray], tuple[list[int], SamplerState]]
"""Fills a window [seq_len + 1] with the next row; returns its document starts (each in 1..seq_len) and the changed
positions."""


class Sampler(Protocol):
    """Rows of one data rank: from row R of the run, rank r of dp takes the rows R + r, R + r + dp, and so on."""

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
