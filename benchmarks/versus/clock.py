"""Clock of training steps: device events, peak memory of the timed steps and first losses, without synchronizing."""

import statistics
import time
from itertools import pairwise
from typing import Any

import torch

LOSSES = 5
"""Number of first losses to compare."""


class Clock:
    """Records the ends of steps, and keeps losses on the device. Both sides call it at the same places."""

    def __init__(self, warmup: int) -> None:
        self._cuda, self._warmup = torch.cuda.is_available(), warmup
        self._marks: list[Any] = []
        self._losses: list[Any] = []
        self._allocated = self._reserved = 0

    def begin_step(self) -> None:
        """Before the first step, return to the device what building the model and loading weights left cached."""
        if self._cuda and not self._marks:
            torch.cuda.empty_cache()

    def end_step(self, loss: Any) -> None:
        """Record that a step was queued."""
        self._losses.append(loss.detach().clone())
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        self._marks.append(torch.cuda.Event(enable_timing=True))
        self._marks[-1].record()
        if len(self._marks) > self._warmup:
            # Read at every step: a trainer's own report may reset the peaks.
            self._allocated = max(self._allocated, torch.cuda.max_memory_allocated())
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())
        elif len(self._marks) == self._warmup:
            torch.cuda.reset_peak_memory_stats()

    def result(self, tokens: int) -> dict[str, Any]:
        """Rate and memory (GiB; None on a CPU) of the timed steps of `tokens` tokens, and the first losses."""
        marks = self._marks[self._warmup - 1 :]
        if self._cuda:
            torch.cuda.synchronize()
            seconds = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks)]
        else:
            seconds = [end - begin for begin, end in pairwise(marks)]
        return {
            "tokens_per_second": tokens / statistics.median(seconds),
            "steps": len(seconds),
            "allocated": self._allocated / 2**30 if self._cuda else None,
            "reserved": self._reserved / 2**30 if self._cuda else None,
            "losses": [float(loss) for loss in self._losses[:LOSSES]],
        }
