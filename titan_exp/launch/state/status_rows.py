"""Rows of `titan-exp status`: state, newest metrics and predictions of each run."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.training import sequences_after
from titan_exp.config.paths.foreign_file import read_text
from titan_exp.config.schema.typed_config import load_group
from titan_exp.launch.state.run_lookup import RunEntry
from titan_exp.launch.state.run_status import RunStatus, run_statuses
from titan_exp.launch.worlds import WorldsSummary, summarize_worlds
from titan_exp.plan.prediction import read_predicted_metrics
from titan_exp.tracking.run_folder.metrics_jsonl import read_last_values
from titan_exp.tracking.run_folder.provenance_records import Lineage, read_environment_record
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.sinks.sink import REPORTED, Value

_STEPS = re.compile(r"^training:\n(?:  .*\n)*?  steps: (\d{1,15})$", re.MULTILINE)
_STOP_AFTER = re.compile(r"^training:\n(?:  .*\n)*?  stop_after: (\d{1,15})$", re.MULTILINE)
_RAMP = re.compile(r"^training:\n(?:  .*\n)*?  batch_ramp:$", re.MULTILINE)
_DEVICE = re.compile(r"^cluster:\n(?:  .*\n)*?  device: (\w+)$", re.MULTILINE)


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
    now = run_statuses([entry.folder for entry in found])
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
    values, predicted = read_last_values(entry.folder.metrics), read_predicted_metrics(entry.folder)
    # Metrics may be ahead of state.json, written at the end.
    logged = int(values.get("step") or 0) if values.get("attempt") == status.attempt else 0
    step = max(status.step, logged)
    steps, on_gpu = _configured(entry)
    left = None
    if status.state == "running" and steps is not None:
        left = _seconds_left(values, step, steps, _sequences_after(entry.folder))
    lineage = _lineage(entry.folder)
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
        seconds_left=left,
        gpu_hours=_hours(entry.folder, status) if on_gpu else None,
        job_id=status.job_id,
        reason=status.reason,
        removed=entry.removed,
        warning=entry.folder.warning() if status.state == "running" else None,
        memory=values.get("memory"),
        memory_predicted=predicted.memory,
        tokens_per_second_predicted=predicted.tokens_per_second,
        validation_loss=values.get("validation_loss"),
        parent=None if lineage is None else lineage.name,
        parent_step=None if lineage is None else lineage.step,
        rung=None if entry.point is None or not entry.rungs else entry.point.round,
        groups=_worlds(entry.folder),
        reported={name: value for name, value in values.items() if name.startswith(REPORTED)},
    )


def _worlds(folder: RunFolder) -> WorldsSummary | None:
    with suppress(UserError):  # damaged metrics
        return summarize_worlds(folder)
    return None


def _lineage(folder: RunFolder) -> Lineage | None:
    with suppress(UserError):  # damaged, which `show` explains; the table is of other runs as well
        return Lineage.read(folder.path)
    return None


def _seconds_left(values: dict[str, Value], step: int, steps: int, sequences: Callable[[int], int]) -> float | None:
    tokens, logged, speed = values.get("tokens"), values.get("step"), values.get("tokens_per_second")
    if not tokens or not logged or not speed:
        return None
    return (sequences(steps) - sequences(step)) * tokens / sequences(int(logged)) / speed


def _sequences_after(folder: RunFolder) -> Callable[[int], int]:
    """Sequences of the first steps together, or their number where every step has as many."""
    if _RAMP.search(read_text(folder.config)) is None:
        return lambda steps: steps
    training = load_group(folder.config, "training", trust=True)
    return lambda steps: sequences_after(training.batch_ramp, training.global_batch_size, steps)


def _hours(folder: RunFolder, status: RunStatus) -> float:
    """Process-hours of all attempts."""
    seconds = 0.0
    for row in folder.read_attempts():
        if row.start is not None:
            end = row.end if row.end is not None else (time.time() if status.state == "running" else row.start)
            seconds += (end - row.start) * row.world_size
    return seconds / 3600


def _configured(entry: RunEntry) -> tuple[int | None, bool]:
    """Total steps, and True if the run is on GPUs, from its configuration."""
    try:
        text = read_text(entry.folder.config)
    except FileNotFoundError:
        return (None if entry.point is None else entry.point.steps), False
    # The format is our own, and parsing a thousand files as YAML takes many seconds.
    found, device = _STOP_AFTER.search(text) or _STEPS.search(text), _DEVICE.search(text)
    steps = int(found[1]) if found else None
    if device is not None and device[1] != "auto":
        return steps, device[1] == "cuda"
    try:
        return steps, bool((read_environment_record(entry.folder.env) or {}).get("gpus"))
    except UserError:
        return steps, False
