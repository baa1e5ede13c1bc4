"""Rows of `titan-exp status`: state, newest metrics and predictions of each run."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.training import sequences_after
from titan_exp.launch.state.run_lookup import RunEntry
from titan_exp.launch.state.run_status import run_statuses
from titan_exp.launch.worlds import WorldsSummary, summarize_worlds
from titan_exp.tracking.run_folder.run import Run, RunStatus
from titan_exp.tracking.sinks.sink import REPORTED, Value

Found = TypeVar("Found")


@dataclass(frozen=True)
class StatusRow:
    """Row of the status table with the latest metrics; None if unknown."""

    label: str
    group: str
    """Study, or `experiment.name`."""
    run_id: str
    folder: str
    state: str
    step: int
    steps: int | None
    """Step after which the run ends."""
    loss: Value
    """In nats per token."""
    tokens_per_second: Value
    """Throughput of the whole job."""
    mfu: Value
    """From 0 to 1."""
    seconds_left: Value
    """Remaining seconds of a running run at its latest throughput."""
    gpu_hours: Value
    """GPU-hours of all attempts; None on CPU."""
    job_id: str | None
    reason: str | None
    removed: bool
    """True if the study no longer contains this point."""
    warning: str | None = None
    """Failing saves or uploads of a running run."""
    memory: Value = None
    """Peak memory of rank 0 in GiB: allocated tensors on a GPU, resident set on a CPU."""
    memory_predicted: Value = None
    tokens_per_second_predicted: Value = None
    validation_loss: Value = None
    parent: str | None = None
    """NAME/ID or URL of the run from which a continued one begins."""
    parent_step: int | None = None
    """Step at which a continued run begins."""
    rung: int | None = None
    """Rung of successive halving, from 1."""
    groups: WorldsSummary | None = None
    """What happened to the worlds of the run; None if it has one."""
    reported: Mapping[str, Value] = field(default_factory=dict)
    """Metrics reported by the objective, the model and the optimizer, by name."""


def status_rows(found: Sequence[RunEntry]) -> list[StatusRow]:
    """Build the status row of each run."""
    now = run_statuses([entry.run for entry in found])
    return [_row_or_damage(entry, now[entry.folder.path]) for entry in found]


def _row_or_damage(entry: RunEntry, status: RunStatus) -> StatusRow:
    """Row of a run; of one with a damaged file, which is the reason, if the table would fail for it."""
    try:
        return _row(entry, status)
    except UserError as error:
        name, folder = entry.folder.path.name, str(entry.folder.path)
        return StatusRow(
            *(entry.label, entry.group, name, folder, "unreadable", status.step),
            *(None, None, None, None, None, None, status.job_id, status.reason or str(error), entry.removed),
        )


def _row(entry: RunEntry, status: RunStatus) -> StatusRow:
    run = entry.run
    values = run.last_values
    # Metrics may be ahead of state.json, written at the end.
    logged = int(values.get("step") or 0) if values.get("attempt") == status.attempt else 0
    step = max(status.step, logged)
    try:
        training, device = (run.config.get(group) or {} for group in ("training", "cluster"))
        steps = _count(training.get("stop_after")) or _count(training.get("steps"))
    except UserError:  # missing or damaged, which `show` explains
        training, device = {}, {}
        steps = None if entry.folder.config.exists() or entry.point is None else entry.point.steps
    lineage = _known(lambda: run.lineage)
    return StatusRow(
        label=entry.label,
        group=entry.group,
        run_id=entry.folder.path.name,
        folder=str(entry.folder.path),
        state=status.state,
        step=step,
        steps=steps,
        loss=values.get("loss"),
        tokens_per_second=values.get("tokens_per_second"),
        mfu=values.get("mfu"),
        seconds_left=_seconds_left(run, step, steps) if status.state == "running" and steps is not None else None,
        gpu_hours=_hours(run, status) if _is_on_gpu(run, device.get("device")) else None,
        job_id=status.job_id,
        reason=status.reason,
        removed=entry.removed,
        warning=entry.folder.warning() if status.state == "running" else None,
        memory=values.get("memory"),
        memory_predicted=run.predicted.memory,
        tokens_per_second_predicted=run.predicted.tokens_per_second,
        validation_loss=values.get("validation_loss"),
        parent=None if lineage is None else lineage.name,
        parent_step=None if lineage is None else lineage.step,
        rung=None if entry.point is None or not entry.rungs else entry.point.round,
        groups=_known(lambda: summarize_worlds(entry.folder)),
        reported={name: value for name, value in values.items() if name.startswith(REPORTED)},
    )


def _known(read: Callable[[], Found]) -> Found | None:
    """What a file holds; None if it is damaged, which `show` explains: the table is of other runs as well."""
    with suppress(UserError):
        return read()
    return None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 10**15 else None


def _seconds_left(run: Run, step: int, steps: int) -> float | None:
    values = run.last_values
    tokens, logged, speed = values.get("tokens"), values.get("step"), values.get("tokens_per_second")
    if not tokens or not logged or not speed:
        return None
    left, done = steps - step, int(logged)
    if run.config["training"].get("batch_ramp"):
        training = run.group("training")
        ends = [
            sequences_after(training.batch_ramp, training.global_batch_size, end) for end in (steps, step, int(logged))
        ]
        left, done = ends[0] - ends[1], ends[2]
    return left * tokens / done / speed


def _hours(run: Run, status: RunStatus) -> float:
    """Process-hours of all attempts."""
    seconds = 0.0
    for row in run.attempts:
        if row.start is not None:
            end = row.end if row.end is not None else (time.time() if status.state == "running" else row.start)
            seconds += (end - row.start) * row.world_size
    return seconds / 3600


def _is_on_gpu(run: Run, device: object) -> bool:
    """True if the configuration says so, or leaves it to the machine, which has GPUs."""
    if device in ("cpu", "cuda"):
        return device == "cuda"
    return bool((_known(lambda: run.environment) or {}).get("gpus"))
