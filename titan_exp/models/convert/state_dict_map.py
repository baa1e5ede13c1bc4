"""State-dict map: row ranges of our parameters in terms of another tool's tensors, as plain data.

Streaming and sharded reading need no whole tensors: a range of rows of ours is gathered from ranges of theirs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class RowRange:
    """Rows of one of our parameters, equal to rows of one of their tensors."""

    start: int
    """First row of ours."""
    rows: int
    """Number of rows, consecutive in ours."""
    name: str
    """Their tensor."""
    first: int
    """First row of theirs."""
    step: int = 1
    """Stride of the rows in theirs."""

    def within(self, start: int, stop: int) -> "RowRange | None":
        """Overlap with our rows `start` to `stop`; None if empty."""
        low, high = max(start, self.start), min(stop, self.start + self.rows)
        if low >= high:
            return None
        return RowRange(low, high - low, self.name, self.first + (low - self.start) * self.step, self.step)

    @property
    def theirs(self) -> slice:
        """Rows of their tensor."""
        return slice(self.first, self.first + (self.rows - 1) * self.step + 1, self.step)

    @property
    def ours(self) -> slice:
        """Rows of our parameter."""
        return slice(self.start, self.start + self.rows)


@dataclass(frozen=True)
class StateDictMap:
    """Our parameters as row ranges of their tensors."""

    runs: Mapping[str, tuple[RowRange, ...]]
    """Row ranges by our full name, in order, covering all rows. A vector's rows are its elements."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape by our full name."""
    their_shapes: Mapping[str, tuple[int, ...]]
    """Shape by their name, in the order of writing."""
    copies: Mapping[str, str]
    """Their tensors that duplicate another one of theirs (a tied head), by name."""
    optional: frozenset[str] = frozenset()
    """Their tensors that may be there and are not read, such as the head of a tied model."""

    def of(self, name: str, start: int, stop: int) -> Iterator[RowRange]:
        """Row ranges of our rows `start` to `stop`."""
        for run in self.runs[name]:
            part = run.within(start, stop)
            if part is not None:
                yield part

    @cached_property
    def owners(self) -> dict[str, tuple[str, tuple[RowRange, ...]]]:
        """Our parameter that holds each tensor of theirs, with its row ranges, by their name."""
        found: dict[str, tuple[str, list[RowRange]]] = {}
        for ours, runs in self.runs.items():
            for run in runs:
                owner, held = found.setdefault(run.name, (ours, []))
                assert owner == ours, "each tensor of theirs belongs to one parameter of ours"
                held.append(run)
        return {name: (ours, tuple(runs)) for name, (ours, runs) in found.items()}
