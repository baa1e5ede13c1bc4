"""Calibration: fits a device's constants to finished runs and reports the errors of predictions.

Four time constants are fitted by robust least squares of log(predicted / measured), with a weak prior at the current
constants for those not determined by any run. The memory constant is the median overhead of processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import numpy.typing as npt

from titan_exp.config.layout.schedule_timeline import pipeline_seconds
from titan_exp.plan.cuda.devices import Device
from titan_exp.plan.device_memory import FITTED
from titan_exp.plan.plan_json import Prediction

MIN_RUNS = 4
"""Minimum number of runs with different predictions for a fit."""
PRIOR_WEIGHT = 0.02
"""Weight of the prior: log (or tens of microseconds) from the current constant, against log error of a run."""
MIN_FACTOR, MAX_FACTOR = 0.02, 2.0
"""Bounds of factors; above 1, since rates may have been measured on a busy machine."""
MAX_LAUNCH_US = 1000.0
"""Upper bound of an operator's host time in microseconds."""


@dataclass(frozen=True)
class Observation:
    """Finished run with its prediction and measurements."""

    label: str
    prediction: Prediction
    device: Device
    """Device of the run with current constants."""
    step_seconds: float
    """Measured median of the step time."""
    memory: float | None
    """Measured peak of rank 0 in bytes: reserved by the allocator on a GPU, of the process on a CPU."""


@dataclass(frozen=True)
class Fit:
    """Fitted constants, and predictions of every run before and after the fit."""

    constants: dict[str, float]
    """Fitted values of `FITTED` fields of the device."""
    before: Sequence[float]
    """Step seconds with the current constants."""
    after: Sequence[float]
    """Step seconds with the fitted constants."""
    unseen: Sequence[float]
    """Step seconds with constants fitted to all other runs (leave-one-out)."""
    memory_before: Sequence[float]
    """Bytes of rank 0 with the current constants."""
    memory_after: Sequence[float]
    """Bytes of rank 0 with the fitted constants."""


def fit(observations: Sequence[Observation]) -> Fit:
    """Fit the constants of one device to at least `MIN_RUNS` runs with different predictions."""
    assert len(observations) >= MIN_RUNS, "the caller refuses fewer"
    first = observations[0].device
    constants = _fitted(observations, first)
    after = [step_seconds(run, constants) for run in observations]
    unseen = [
        step_seconds(run, _fitted([other for other in observations if other is not run], first)) for run in observations
    ]
    peaks = [run.prediction.ranks[0].peak for run in observations]
    beside = [run.memory - peak for run, peak in zip(observations, peaks, strict=True) if run.memory is not None]
    overhead = max(0.0, float(median(beside))) if beside else 0.0
    if beside:
        constants["overhead_gb"] = overhead / 1e9
    elif first.overhead_gb is not None:
        constants["overhead_gb"] = first.overhead_gb
    memory_before = [peak + run.device.overhead() for run, peak in zip(observations, peaks, strict=True)]
    before = [step_seconds(run, {}) for run in observations]
    return Fit(constants, before, after, unseen, memory_before, [peak + overhead for peak in peaks])


def step_seconds(observation: Observation, constants: Mapping[str, float]) -> float:
    """Predicted step seconds of a run with the given constants."""
    before, after = observation.device, replace(observation.device, **constants)
    totals = dict[int, float]()
    for rank in observation.prediction.ranks:
        assert rank.seconds is not None, "predicted for a device whose rates are known"
        compute = rank.seconds["matmuls"] * before.matmul_factor / after.matmul_factor
        compute += rank.seconds["elementwise"] * before.bandwidth_factor / after.bandwidth_factor
        compute += after.launch_seconds(rank.operators, compute)
        link = before.link_factor / after.link_factor
        behind = rank.seconds["behind"] * link
        exchange = rank.seconds.get("exchange", 0.0)  # older runs have none
        totals[rank.pipeline_rank] = max(compute + rank.seconds["exposed"] * link, behind) + exchange
    return pipeline_seconds(totals, len(totals), observation.prediction.bubble)


def _fitted(observations: Sequence[Observation], device: Device) -> dict[str, float]:
    from scipy.optimize import least_squares

    factors = [device.matmul_factor, device.bandwidth_factor, device.link_factor]
    start = np.array([*np.log(np.clip(factors, MIN_FACTOR, MAX_FACTOR)), min(device.launch_us, MAX_LAUNCH_US) / 10])

    def errors(point: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        constants = _constants(point)
        log_errors = [np.log(step_seconds(run, constants) / run.step_seconds) for run in observations]
        return np.array([*log_errors, *(PRIOR_WEIGHT * (point - start))])

    low, high = np.log(MIN_FACTOR), np.log(MAX_FACTOR)
    bounds = ([low] * 3 + [0.0], [high] * 3 + [MAX_LAUNCH_US / 10])
    inside = np.clip(start, np.array(bounds[0]) + 1e-6, np.array(bounds[1]) - 1e-6)
    return _constants(least_squares(errors, inside, bounds=bounds, loss="soft_l1", f_scale=0.1).x)


def _constants(point: npt.NDArray[np.float64]) -> dict[str, float]:
    values = (*np.exp(point[:3]), 10 * point[3])
    return {name: float(value) for name, value in zip(FITTED, values, strict=False)}
