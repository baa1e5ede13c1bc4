"""Which rows of one implementation's tensors are which rows of another's: plain data, worked on in parts.

Streaming and sharded reading need no whole tensors: a range of rows of ours is gathered from ranges of theirs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Run:
    """Rows of one of our parameters, and the rows of one of their tensors that they are."""

    start: int
    """First row of ours."""
    rows: int
    """How many rows, consecutive in ours."""
    name: str
    """Their tensor."""
    first: int
    """First row of theirs."""
    step: int = 1
    """Distance of the rows in theirs."""

    def within(self, start: int, stop: int) -> "Run | None":
        """The part of this run in our rows `start` to `stop`; None where there is none."""
        low, high = max(start, self.start), min(stop, self.start + self.rows)
        if low >= high:
            return None
        return Run(low, high - low, self.name, self.first + (low - self.start) * self.step, self.step)

    @property
    def theirs(self) -> slice:
        """The rows of their tensor."""
        return slice(self.first, self.first + (self.rows - 1) * self.step + 1, self.step)

    @property
    def ours(self) -> slice:
        """The rows of our parameter."""
        return slice(self.start, self.start + self.rows)


@dataclass(frozen=True)
class StateDictMap:
    """Every parameter of ours in terms of their tensors."""

    runs: Mapping[str, tuple[Run, ...]]
    """By our full name: runs in order of our rows, which cover all of them. A vector's rows are its elements."""
    shapes: Mapping[str, tuple[int, ...]]
    """By our full name: the shape."""
    their_shapes: Mapping[str, tuple[int, ...]]
    """By their name: the shape, in the order in which they are written."""
    copies: Mapping[str, str]
    """Their tensors that are no parameter of ours, but the same as another one of theirs (a tied head), by name."""
    optional: frozenset[str] = frozenset()
    """Their tensors that may be there and are not read, such as the head of a tied model."""

    def of(self, name: str, start: int, stop: int) -> Iterator[Run]:
        """The runs of our rows `start` to `stop`."""
        for run in self.runs[name]:
            part = run.within(start, stop)
            if part is not None:
                yield part

    @cached_property
    def owners(self) -> dict[str, tuple[str, tuple[Run, ...]]]:
        """By their name: the one parameter of ours that holds all of it, and the runs that do."""
        found: dict[str, tuple[str, list[Run]]] = {}
        for ours, runs in self.runs.items():
            for run in runs:
                owner, held = found.setdefault(run.name, (ours, []))
                assert owner == ours, "a tensor of theirs is never divided among parameters of ours"
                held.append(run)
        return {name: (ours, tuple(runs)) for name, (ours, runs) in found.items()}
