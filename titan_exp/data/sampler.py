"""Where a data rank's rows come from: the interface between the training loader and the two ways of ordering rows."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

SamplerState = dict[str, dict[str, Any]]
"""Positions, in JSON's types, by name; each rank holds some of a run's."""


class RowReader(Protocol):
    """Rows of one rank from a position on, for ever."""

    def prepare(self) -> None:
        """Begin to fetch what the first rows need, without waiting for it."""
        ...

    def next_row(self, window: np.ndarray) -> tuple[list[int], SamplerState]:
        """Fill `window` [seq_len + 1] with the next row.

        Returns where in it documents begin (each in 1..seq_len), and the positions that the row has changed.
        """
        ...


class Sampler(Protocol):
    """One rank's share of an order of rows that is the same in every layout: row j of the run is on rank j mod dp."""

    corpus: dict[str, Any]
    """What positions refer to, the same on every rank; each key is the configuration key to blame where it differs."""
    initial_state: SamplerState
    """The positions before the first row."""

    def restrict(self, states: Mapping[str, dict[str, Any]]) -> SamplerState:
        """This rank's part of the positions of all ranks of a run, of any dp degree, at the end of a global batch.

        Raises:
            UserError: they are not all there, or not at the same row.
        """
        ...

    def open(self, states: SamplerState) -> RowReader:
        """A reader from positions of this rank on."""
        ...

    def state_at(self, rows: int) -> SamplerState | None:
        """The positions after so many rows of the run (a multiple of dp); None where only reading leads there."""
        ...

    def source_name(self, row: int) -> str:
        """Name of the source of row `row` of the run; empty where there is one source."""
        ...

    def epochs(self, states: SamplerState) -> dict[str, float]:
        """Passes over each source until these positions, by its name, and over all of them under the empty name."""
        ...

    def close(self) -> None:
        """Stop what runs in the background."""
        ...
