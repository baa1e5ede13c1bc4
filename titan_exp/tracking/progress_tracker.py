"""Where this process is in its training, for whoever watches it from another thread: step, phase, and since when.

The trainer says it; nothing here costs more than reading a clock.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

START, STEP, FIRST_STEP = "the start", "the training step", "the first step"
"""Names of the phases that a process is in by itself; `phase` names others."""
MEDIAN_WINDOW = 51
"""Steps whose times the median is taken of."""


@dataclass(frozen=True)
class ProgressSnapshot:
    """Where a process is."""

    step: int
    """The last finished step."""
    phase: str
    """What it is in, in words."""
    seconds: float
    """For how long nothing has been reported."""
    median_step_seconds: float
    """Median seconds from the end of a step to the end of the next; 0.0 where no two steps have ended yet."""

    @property
    def at(self) -> int:
        """The step that it is about: the one being trained, or the last one, after which it evaluates or saves."""
        return self.step + (self.phase in (STEP, FIRST_STEP))


class ProgressTracker:
    """What one process has reported; one thread reports, another looks.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # One object, replaced as a whole, so that no reader sees half of a change.
        self._now: tuple[int, str, float] = (0, START, clock())
        self._ended: float | None = None
        self._times: deque[float] = deque(maxlen=MEDIAN_WINDOW)

    def begin(self, step: int) -> None:
        """Training begins after step number `step`; the step to come may compile, allocate and tune."""
        self._now = (step, FIRST_STEP, self._clock())

    def step(self, step: int) -> None:
        """A step has ended."""
        now = self._clock()
        if self._ended is not None:
            self._times.append(now - self._ended)
        self._ended = now
        self._now = (step, STEP, now)

    def keep_alive(self) -> None:
        """A part of a long phase has ended: one batch of an evaluation, say."""
        step, phase, _ = self._now
        self._now = (step, phase, self._clock())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """For the time of the block this process is in something else than a training step."""
        step, before, _ = self._now
        self._now = (step, name, self._clock())
        try:
            yield
        finally:
            self._now = (step, before, self._clock())

    def snapshot(self) -> ProgressSnapshot:
        """Where the process is now."""
        step, phase, since = self._now
        times = list(self._times)
        return ProgressSnapshot(step, phase, self._clock() - since, statistics.median(times) if times else 0.0)


PROGRESS = ProgressTracker()
"""This process's own."""
