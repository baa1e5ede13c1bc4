"""Microbenchmark: median time of repeated calls within a time budget, as a rate."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MIN_CALLS, MAX_CALLS = 3, 50
"""Minimum and maximum number of timed calls."""


@dataclass(frozen=True)
class Measurement:
    """Measured rate, or the reason why it could not be measured."""

    kind: str
    """`gemm`, `attention`, `copy`, `host copy`, `link` or `disk`."""
    name: str
    """Dtype, shape, backend, direction."""
    value: float | None
    """Median rate in `unit`; None if it cannot be measured on this machine."""
    unit: str
    """`TFLOP/s` or `GB/s`, with 10⁹ bytes."""
    seconds: float | None = None
    """Median time of a call."""
    expected: float | None = None
    """Data-sheet peak in `unit`, if known."""
    note: str = ""
    """Reason for a missing value, or a remark."""


def measure_rate(
    kind: str,
    name: str,
    call: Callable[[], object],
    *,
    amount: float,
    unit: str,
    device: torch.device,
    limit: float,
    expected: float | None = None,
) -> Measurement:
    """Measure the rate of a call that does `amount` of work (TFLOP or GB), for about `limit` seconds."""
    try:
        seconds = median_seconds(call, device, limit)
    except (RuntimeError, NotImplementedError, ValueError, ImportError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
        return Measurement(kind, name, None, unit, note=f"not supported here: {reason[:80]}")
    return Measurement(kind, name, amount / seconds, unit, seconds, expected)


def median_seconds(
    call: Callable[[], object], device: torch.device, limit: float, agree: Callable[[int], int] = lambda calls: calls
) -> float:
    """Median seconds per synchronized call, after one warm-up call.

    The first timed call determines the number of calls; `agree` makes it equal on all ranks if the call is a
    collective.
    """

    def timed() -> float:
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    timed()
    seconds = [timed()]
    calls = agree(min(MAX_CALLS, max(MIN_CALLS, int(limit / max(seconds[0], 1e-6)))))
    seconds += [timed() for _ in range(calls - 1)]
    return statistics.median(seconds)
