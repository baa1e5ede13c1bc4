"""Straggler detection: compares the own times of ranks that do the same work, row by row."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from titan_exp.trainer.profiling.step_times import OwnTimes

OWN_RATIO = 1.3
"""A rank is slow if its own time exceeds the median of its peers by this factor."""
PROBE_RATIO = {"cpu": 1.5, "cuda": 1.2}
"""The same for the probe matmul, by device; on a CPU it is so short that other processes disturb it."""
MIN_SECONDS = 2e-3
"""Seconds per step by which the own time must also exceed the median: shorter delays do not matter."""
ROWS = 3
"""Consecutive rows in which a rank must be slow before it is reported."""


@dataclass(frozen=True)
class Straggler:
    """A rank that has been slow for `ROWS` rows."""

    rank: int
    """Global rank."""
    reason: str
    """Cause of the delay, as logged."""


class Stragglers:
    """Straggler detection of one attempt, on rank 0.

    Own times are compared within a pipeline stage, whose `stage_size` ranks are consecutive and do the same work; the
    probe matmul is compared among all ranks.
    """

    def __init__(self, stage_size: int, device: str) -> None:
        self._stage_size, self._probe_ratio = stage_size, PROBE_RATIO[device]
        self._rows: dict[tuple[int, str], int] = {}

    def find(self, times: Sequence[OwnTimes]) -> list[Straggler]:
        """Check the times of all ranks in one row; a straggler is returned once until it has recovered."""
        found = []
        for rank, own in enumerate(times):
            first = rank - rank % self._stage_size
            stage = enumerate(times[first : first + self._stage_size], first)
            peers = [peer.own for other, peer in stage if other != rank]
            median = statistics.median(peers) if peers else own.own
            if self._persists(rank, "own", own.own > max(OWN_RATIO * median, median + MIN_SECONDS)):
                found.append(Straggler(rank, _own_reason(own, median)))
            probes = [other.probe for number, other in enumerate(times) if number != rank and other.probe > 0]
            median = statistics.median(probes) if probes else own.probe
            if self._persists(rank, "probe", own.probe > self._probe_ratio * median):
                found.append(
                    Straggler(
                        rank,
                        f"its device takes {own.probe / median:.1f} times as long as the others' for the same small "
                        f"matmul ({1e3 * own.probe:.3f} ms): is it throttled, shared, or another model?",
                    )
                )
        return found

    def _persists(self, rank: int, kind: str, slow: bool) -> bool:
        rows = self._rows.get((rank, kind), 0) + 1 if slow else 0
        self._rows[rank, kind] = rows
        return rows == ROWS


def _own_reason(own: OwnTimes, median: float) -> str:
    return (
        f"its own time is {own.own:.3f} s a step, {own.own / max(median, 1e-9):.1f} times that of the ranks that do "
        f"the same work ({median:.3f} s), of which {own.data:.3f} s wait for data. Own time is data loading and "
        "processor time of the main thread, without waiting for other ranks"
    )
