"""One measured rate, and how it is measured: the median of repeated calls within a given time."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

LEAST_CALLS, MOST_CALLS = 3, 50
"""How often something is called that is measured, however slow or quick it is."""


@dataclass(frozen=True)
class Measurement:
    """What was measured, or why it could not be."""

    kind: str
    """`gemm`, `attention`, `copy`, `host copy`, `link` or `disk`."""
    name: str
    """What exactly: type, shape, backend, direction."""
    value: float | None
    """The median rate in `unit`; None where it cannot be measured here."""
    unit: str
    """`TFLOP/s` or `GB/s`, with 10⁹ bytes."""
    seconds: float | None = None
    """Median seconds of one call."""
    expected: float | None = None
    """What the data sheet of the device says, in `unit`; None where that is not known."""
    note: str = ""
    """Why there is no value, or what is special about it."""


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
    """Measure a call's rate.

    Args:
        kind: of the rate.
        name: of the rate.
        call: what is measured.
        amount: what a call does, in `unit` times seconds.
        unit: of the rate.
        device: what is waited for after a call.
        limit: seconds that measuring may take; three calls are made whatever they take.
        expected: what a data sheet says.
    """
    try:
        seconds = median_seconds(call, device, limit)
    except (RuntimeError, NotImplementedError, ValueError, ImportError, TypeError) as error:
        words = (str(error).strip() or type(error).__name__).splitlines()[0].partition(". ")[0]
        return Measurement(kind, name, None, unit, note=f"not here: {words[:80]}")
    return Measurement(kind, name, amount / seconds, unit, seconds, expected)


def median_seconds(call: Callable[[], object], device: torch.device, limit: float) -> float:
    """Median seconds of a call, the first of which is not counted; each is waited for."""
    began = time.perf_counter()
    call()
    synchronize(device)
    seconds: list[float] = []
    while len(seconds) < LEAST_CALLS or (len(seconds) < MOST_CALLS and time.perf_counter() - began < limit):
        begin = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
