"""Fitting a device's few constants to finished runs, and how good predictions are with them.

Time is a sum of terms, each known up to one constant, fitted by least squares of log(predicted / measured), robust
against single runs that were disturbed, and pulled weakly towards what it was, so that what no run tells stays as it
is. Memory gets one constant, the median of what processes have beside what was predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from titan_exp.plan.calibrated_constants import Constants
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.plan_json import Prediction

if TYPE_CHECKING:
    import numpy as np

MIN_RUNS = 4
"""Runs that differ in what they take, for that many constants."""
PRIOR_WEIGHT = 0.02
"""Weight of a constant's distance from what it was, in log or in tens of microseconds, against a run's error in log."""
MIN_SHARE, MAX_SHARE = 0.02, 2.0
"""Between which shares are looked for; above 1 where a rate was measured on a busier machine."""
MAX_OPERATOR_US = 1000.0
"""Microseconds below which the time of an operator is looked for."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Observation:
    """A finished run, and what was predicted of it."""

    label: str
    """What the run is called."""
    prediction: Prediction
    """As predicted for `device`."""
    device: Device
    """Its rates as this run had them, with the constants that are in force."""
    step_seconds: float
    """Measured: median seconds of a step."""
    memory: float | None
    """Measured, in bytes, of rank 0 at its peak: reserved by the allocator on a GPU, of the process on a CPU."""


@dataclass(frozen=True)
class Fit:
    """Constants, and how good predictions are with and without them. Errors are |predicted / measured - 1|."""

    constants: Constants
    """What was fitted."""
    before: tuple[float, ...]
    """Seconds predicted of each run's step with the constants in force."""
    after: tuple[float, ...]
    """The same with those fitted."""
    unseen: tuple[float, ...]
    """The same with those fitted to all runs but this one: what to expect of a run that is not among them."""
    memory_before: tuple[float | None, ...]
    """Bytes predicted of rank 0 with the constants in force; None where none were measured."""
    memory_after: tuple[float | None, ...]
    """The same with those fitted."""


def fit(observations: Sequence[Observation]) -> Fit:
    """Fit a device's constants.

    Args:
        observations: runs of one device, at least `MIN_RUNS` that differ in what was predicted of them.
    """
    assert len(observations) >= MIN_RUNS, "the caller refuses fewer, in words"
    first = observations[0].device
    found = _fitted(observations, first)
    unseen = [
        step_seconds(one, _fitted(others, first))
        for one, others in zip(observations, _without_each(observations), strict=True)
    ]
    overhead = _overhead(observations)
    constants = replace(found, overhead_gb=first.overhead_gb if overhead is None else overhead / 1e9)
    own = Constants()
    return Fit(
        replace(constants, device=first.name, runs=len(observations)),
        tuple(step_seconds(one, own) for one in observations),
        tuple(step_seconds(one, found) for one in observations),
        tuple(unseen),
        tuple(_memory(one, one.device.overhead_gb * 1e9) for one in observations),
        tuple(_memory(one, overhead or 0.0) for one in observations),
    )


def step_seconds(observation: Observation, constants: Constants) -> float:
    """Seconds of a run's step with constants in place of those that it was predicted with."""
    before, after = observation.device, constants.over(observation.device)
    longest = 0.0
    for rank in observation.prediction.ranks:
        assert rank.seconds is not None, "predicted for a device whose rates are known"
        compute = rank.seconds["matmuls"] * before.matmul_share / after.matmul_share
        compute += rank.seconds["elementwise"] * before.bandwidth_share / after.bandwidth_share
        compute += rank.operators * after.operator_us / 1e6
        link = before.link_share / after.link_share
        longest = max(longest, compute + rank.seconds["exposed"] * link, rank.seconds["behind"] * link)
    return longest / (1 - observation.prediction.bubble)


def _fitted(observations: Sequence[Observation], device: Device) -> Constants:
    import numpy as np
    from scipy.optimize import least_squares

    shares = [device.matmul_share, device.bandwidth_share, device.link_share]
    start = np.array([*np.log(np.clip(shares, MIN_SHARE, MAX_SHARE)), min(device.operator_us, MAX_OPERATOR_US) / 10])

    def misses(point: "np.ndarray") -> "np.ndarray":
        constants = _constants(point)
        missed = [np.log(step_seconds(one, constants) / one.step_seconds) for one in observations]
        return np.array([*missed, *(PRIOR_WEIGHT * (point - start))])

    low, high = np.log(MIN_SHARE), np.log(MAX_SHARE)
    bounds = ([low] * 3 + [0.0], [high] * 3 + [MAX_OPERATOR_US / 10])
    inside = np.clip(start, np.array(bounds[0]) + 1e-6, np.array(bounds[1]) - 1e-6)
    return _constants(least_squares(misses, inside, bounds=bounds, loss="soft_l1", f_scale=0.1).x)


def _constants(point: Any) -> Constants:
    import numpy as np

    matmuls, bandwidth, link = (float(value) for value in np.exp(point[:3]))
    return Constants("", matmuls, bandwidth, link, 10 * float(point[3]))


def _overhead(observations: Sequence[Observation]) -> float | None:
    import numpy as np

    beside = [one.memory - one.prediction.ranks[0].peak for one in observations if one.memory is not None]
    return max(0.0, float(np.median(beside))) if beside else None


def _memory(observation: Observation, overhead: float) -> float | None:
    return None if observation.memory is None else observation.prediction.ranks[0].peak + overhead


def _without_each(items: Sequence[Item]) -> list[list[Item]]:
    return [[*items[:place], *items[place + 1 :]] for place in range(len(items))]
