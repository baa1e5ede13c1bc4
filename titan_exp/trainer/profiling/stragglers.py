"""Straggler detection: compares each rank with the ranks that do the same work, row by row."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from titan_exp.trainer.profiling.step_times import OwnTimes

SLOWER = 1.3
"""A rank that takes so many times as long by itself as the median of its peers is slow."""
SLOWER_PROBE = {"cpu": 1.5, "cuda": 1.2}
"""Of the small matmul, by device; on a CPU it is so short that other processes show in it."""
LEAST = 2e-3
"""Seconds per step that a rank's own part must be longer, too: less delays no rank."""
ROWS = 3
"""Rows in a row in which a rank must be slow before it is named."""


@dataclass(frozen=True)
class Straggler:
    """A rank that has been slow for `ROWS` rows."""

    rank: int
    """Its number."""
    reason: str
    """Cause of the delay, as logged."""


class Stragglers:
    """Judges the rows of one attempt, on rank 0.

    Args:
        stage_size: ranks of a pipeline stage, which do the same work and have consecutive numbers; all of them where
            there is no pipeline. Stages differ by nature and are never compared, but by the small matmul, which is
            the same everywhere.
        device: `cpu` or `cuda`.
    """

    def __init__(self, stage_size: int, device: str) -> None:
        self._stage_size, self._margin = stage_size, SLOWER_PROBE[device]
        self._rows: dict[tuple[int, str], int] = {}

    def judge(self, times: Sequence[OwnTimes]) -> list[Straggler]:
        """Take a row's times of all ranks; returns those that are named now, each once until it has been as quick as
        the others again."""
        found = []
        for rank, mine in enumerate(times):
            first = rank - rank % self._stage_size
            peers = [each for other, each in enumerate(times[first : first + self._stage_size], first) if other != rank]
            others = [each for other, each in enumerate(times) if other != rank]
            if self._lasts(rank, "own", _slow_by_itself(mine, peers)):
                usual = statistics.median(each.own for each in peers)
                found.append(Straggler(rank, _by_itself(mine, usual)))
            if self._lasts(rank, "probe", _slow_device(mine, others, self._margin)):
                usual = statistics.median(each.probe for each in others)
                found.append(
                    Straggler(
                        rank,
                        f"its device takes {mine.probe / usual:.1f} times as long as the others' for the same small "
                        f"matmul ({1e3 * mine.probe:.3f} ms): is it throttled, shared, or another model?",
                    )
                )
        return found

    def _lasts(self, rank: int, what: str, slow: bool) -> bool:
        rows = self._rows.get((rank, what), 0) + 1 if slow else 0
        self._rows[rank, what] = rows
        return rows == ROWS


def _slow_by_itself(mine: OwnTimes, peers: Sequence[OwnTimes]) -> bool:
    if not peers:
        return False
    usual = statistics.median(each.own for each in peers)
    return mine.own > max(SLOWER * usual, usual + LEAST)


def _slow_device(mine: OwnTimes, others: Sequence[OwnTimes], margin: float) -> bool:
    known = [each.probe for each in others if each.probe > 0]
    return bool(known) and mine.probe > margin * statistics.median(known)


def _by_itself(mine: OwnTimes, usual: float) -> str:
    return (
        f"by itself it takes {mine.own:.3f} s a step, {mine.own / max(usual, 1e-9):.1f} times as long as the ranks "
        f"that do the same work ({usual:.3f} s); of that it waits {mine.data:.3f} s for data. Measured is data and the "
        "processor time of its main thread, without waiting for other ranks"
    )
