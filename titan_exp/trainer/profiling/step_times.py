"""Step times of a rank without waiting for other ranks: cheap clocks, no message of their own.

In a step all ranks wait for each other, so that steps take all of them equally long. Measured is therefore what no
other rank can make longer: waiting for data and the main thread's processor time in the step (on a CPU that is the
computation; with a GPU, what launches its kernels), and how long the device takes for a small matmul.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

PROBE_SIZE = {"cpu": 128, "cuda": 2048}
"""Rows and columns of the matrices that the probe multiplies: well under a millisecond."""
PROBES = 4
"""How often the probe multiplies; the quickest counts on a CPU, all but the first on a GPU."""


@dataclass(frozen=True)
class OwnTimes:
    """A rank's times since the row before, in seconds per step but for the last."""

    step: float
    """Of a step by the host's clock, waiting included; logging, evaluation, checkpoints and exports are not."""
    own: float
    """Waiting for data, and processor time of the main thread in the training step."""
    data: float
    """Of `own`: waiting for data."""
    probe: float
    """Seconds of one small matmul on the device, the same on every rank; 0 where none has been timed yet."""


class StepTimes:
    """Clocks of this rank.

    Args:
        device: what trains.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._forget()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """For the time of the block this rank gets its batches."""
        begin = time.perf_counter()
        yield
        self._data += time.perf_counter() - begin

    @contextmanager
    def computing(self) -> Iterator[None]:
        """For the time of the block this rank computes, and waits for others in collectives."""
        begin = time.thread_time()
        yield
        self._processor += time.thread_time() - begin

    def begin(self) -> None:
        """A step begins."""
        self._begun = time.perf_counter()

    def end(self) -> None:
        """A step has ended."""
        self._steps += 1
        self._wall += time.perf_counter() - self._begun

    def take(self) -> OwnTimes:
        """The times since the last call; called where the device has just been waited for."""
        steps = max(self._steps, 1)
        data, processor = self._data / steps, self._processor / steps
        times = OwnTimes(self._wall / steps, data + processor, data, self._probe())
        self._forget()
        return times

    def _forget(self) -> None:
        self._steps = 0
        self._wall = self._data = self._processor = 0.0
        self._begun = time.perf_counter()

    @torch.no_grad()
    def _probe(self) -> float:
        """Seconds of the matmul; on a GPU those of the call before, so that no rank waits for it."""
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
