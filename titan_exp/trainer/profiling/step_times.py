"""Step times of a rank without waiting for other ranks, for straggler detection; no communication.

Ranks wait for each other in every step, so wall time is the same on all of them. We measure times that other ranks
cannot lengthen: data loading, processor time of the main thread (the computation on a CPU, kernel launches with a GPU),
and a small matmul on the device.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

PROBE_SIZE = {"cpu": 128, "cuda": 2048}
"""Rows and columns of the probe's matrices: well under a millisecond."""
PROBES = 4
"""Number of probe matmuls; the fastest counts on a CPU, the mean without the first on a GPU."""


@dataclass(frozen=True)
class OwnTimes:
    """Times of a rank since the previous row, in seconds per step."""

    step: float
    """Wall time of a step, without logging, evaluation, checkpoints and exports."""
    own: float
    """Data loading plus processor time of the main thread."""
    data: float
    """Data loading, a part of `own`."""
    probe: float
    """Seconds of the probe matmul; 0 before the first was timed."""


class StepTimes:
    """Clocks of this rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._reset()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Time the `with` block as data loading."""
        begin = time.perf_counter()
        yield
        self._data += time.perf_counter() - begin

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Time the processor in the `with` block, which also waits in collectives."""
        begin = time.thread_time()
        yield
        self._processor += time.thread_time() - begin

    def begin(self) -> None:
        """Begin a step."""
        self._begun = time.perf_counter()

    def end(self) -> None:
        """End a step."""
        self._steps += 1
        self._wall += time.perf_counter() - self._begun

    def take(self) -> OwnTimes:
        """Times since the last call; called just after the device was synchronized."""
        steps = max(self._steps, 1)
        data, processor = self._data / steps, self._processor / steps
        times = OwnTimes(self._wall / steps, data + processor, data, self._probe())
        self._reset()
        return times

    def _reset(self) -> None:
        self._steps = 0
        self._wall = self._data = self._processor = 0.0
        self._begun = time.perf_counter()

    @torch.no_grad()
    def _probe(self) -> float:
        """Seconds of the probe matmul; on a GPU those of the previous call, which needs no synchronization."""
        size = PROBE_SIZE[self._device.type]
        if self._device.type == "cpu":
            matrix, seconds = torch.ones(size, size), []
            for _ in range(PROBES):
                begin = time.perf_counter()
                torch.mm(matrix, matrix)
                seconds.append(time.perf_counter() - begin)
            return min(seconds)
        found = 0.0
        if self._events is not None:
            found = self._events[0].elapsed_time(self._events[1]) / 1e3 / (PROBES - 1)
        matrix = torch.ones(size, size, device=self._device, dtype=torch.bfloat16)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.mm(matrix, matrix)
        begin.record()
        for _ in range(PROBES - 1):
            torch.mm(matrix, matrix)
        end.record()
        self._events = begin, end
        return found


OWN_RATIO = 1.3
"""Ratio of a rank's own time to the median of its peers above which the rank counts as slow."""
PROBE_RATIO = {"cpu": 1.5, "cuda": 1.2}
"""The same ratio for the probe matmul, by device. On a CPU it is so short that other processes disturb it."""
MIN_SECONDS = 2e-3
"""Seconds per step by which the own time must also exceed the median; shorter delays do not matter."""
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
        """Check the times of all ranks in one row. A straggler is returned once, and again only after it has
        recovered."""
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
