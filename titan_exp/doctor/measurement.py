"""Microbenchmark: median time of repeated calls within a time budget, as a rate."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MIN_CALLS, MAX_CALLS = 3, 50
"""Minimum and maximum number of samples."""
SAMPLE_SECONDS = 0.05
"""Time of a sample on a GPU: calls without a pause between them, at the clock that its power limit sustains."""


@dataclass(frozen=True)
class Measurement:
    """Measured rate, or the reason why it could not be measured."""

    kind: str
    """`gemm`, `attention`, `copy`, `host copy`, `launch`, `memory`, `link` or `disk`."""
    name: str
    """Dtype, shape, backend, direction."""
    value: float | None
    """Median rate in `unit`; None if it cannot be measured on this machine."""
    unit: str
    """`TFLOP/s`, `GB/s` with 10⁹ bytes, `M/s` (10⁶) or `GiB`."""
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
    """Median seconds per call of samples that end with a synchronization, after one warm-up call.

    The first timed call determines the size and number of samples; `agree` makes them equal on all ranks if the call
    is a collective.
    """

    def timed(calls: int = 1) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / calls

    timed()
    first = timed()
    calls = agree(max(1, int(SAMPLE_SECONDS / max(first, 1e-6)))) if device.type == "cuda" else 1
    samples = agree(min(MAX_CALLS, max(MIN_CALLS, int(limit / calls / max(first, 1e-6)))))
    return statistics.median([first if calls == 1 else timed(calls), *(timed(calls) for _ in range(samples - 1))])
