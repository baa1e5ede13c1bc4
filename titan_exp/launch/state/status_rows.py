"""Rows of `titan-exp status`: state, newest metrics and predictions of each run."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from titan_exp.launch.state.run_lookup import RunEntry
from titan_exp.launch.state.run_status import RunStatus, run_statuses
from titan_exp.plan.gate.predicted import read_predicted_metrics
from titan_exp.tracking.run_folder.metrics_jsonl import read_last_values
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.sinks.sink import REPORTED, Value

_STEPS = re.compile(r"^training:\n(?:  .*\n)*?  steps: (\d+)$", re.MULTILINE)
_DEVICE = re.compile(r"^cluster:\n(?:  .*\n)*?  device: (\w+)$", re.MULTILINE)


@dataclass(frozen=True)
class StatusRow:
    """A run as the table shows it. None stands for unknown."""

    label: str
    """Name."""
    group: str
    """The study, or `experiment.name`."""
    run_id: str
    """Its id."""
    folder: str
    """Its folder."""
    state: str
    """One word."""
    step: int
    """Optimizer steps done."""
    steps: int | None
    """Optimizer steps of the whole run."""
    loss: Value
    """Newest, in nats per token."""
    tokens_per_second: Value
    """Newest, of the whole job."""
    mfu: Value
    """Newest, from 0 to 1."""
    seconds_left: Value
    """By the newest speed; of a running run."""
    gpu_hours: Value
    """GPU-hours of all attempts; None on CPU."""
    job_id: str | None
    """The scheduler's number."""
    reason: str | None
    """Why it failed, stopped, waits or was lost."""
    removed: bool
    """True if the study no longer holds it."""
    memory: Value = None
    """Newest, in GiB: the peak of rank 0, of allocated tensors on a GPU, of the process on a CPU."""
    memory_predicted: Value = None
    """The same, predicted before the start; None where it was not."""
    tokens_per_second_predicted: Value = None
    """Predicted throughput of the whole job; None without a prediction."""
    reported: Mapping[str, Value] = field(default_factory=dict)
    """Newest metrics reported by the objective, the model and the optimizer, by name."""


def status_rows(found: Sequence[RunEntry]) -> list[StatusRow]:
    """A row for every run."""
    now = run_statuses([one.folder for one in found])
    return [_row(one, now[one.folder.path]) for one in found]


def _row(one: RunEntry, status: RunStatus) -> StatusRow:
    values, predicted = read_last_values(one.folder.metrics), read_predicted_metrics(one.folder)
    # The newest row may be newer than state.json, which is written at the end.
    logged = int(values.get("step") or 0) if values.get("attempt") == status.attempt else 0
    step = max(status.step, logged)
    steps, on_gpu = _configured(one)
    left = None
    if status.state == "running" and steps is not None:
        left = _seconds_left(values, steps - step)
    return StatusRow(
        label=one.label,
        group=one.group,
        run_id=one.folder.path.name,
        folder=str(one.folder.path),
        state=status.state,
        step=step,
        steps=steps,
        loss=values.get("loss"),
        tokens_per_second=values.get("tokens_per_second"),
        mfu=values.get("mfu"),
        seconds_left=left,
        gpu_hours=_hours(one.folder, status) if on_gpu else None,
        job_id=status.job_id,
        reason=status.reason,
        removed=one.removed,
        memory=values.get("memory"),
        memory_predicted=predicted.memory,
        tokens_per_second_predicted=predicted.tokens_per_second,
        reported={name: value for name, value in values.items() if name.startswith(REPORTED)},
    )


def _seconds_left(values: dict[str, Value], steps_left: int) -> float | None:
    tokens, step, speed = values.get("tokens"), values.get("step"), values.get("tokens_per_second")
    if not tokens or not step or not speed:
        return None
    return steps_left * tokens / step / speed


def _hours(folder: RunFolder, status: RunStatus) -> float:
    """Process hours of all starts."""
    seconds = 0.0
    for row in folder.read_attempts():
        if row.start is not None:
            end = row.end if row.end is not None else (time.time() if status.state == "running" else row.start)
            seconds += (end - row.start) * row.world_size
    return seconds / 3600


def _configured(one: RunEntry) -> tuple[int | None, bool]:
    """Steps of the whole run, and whether it runs on GPUs, from its configuration."""
    try:
        text = one.folder.config.read_text(encoding="utf-8")
    except OSError:
        return (None if one.point is None else one.point.steps), False
    # The file is our own, so lines will do: reading a thousand of them as YAML takes many seconds.
    found, device = _STEPS.search(text), _DEVICE.search(text)
    steps = int(found[1]) if found else None
    if device is not None and device[1] != "auto":
        return steps, device[1] == "cuda"
    try:
        return steps, bool(json.loads(one.folder.env.read_text())["gpus"])
    except (OSError, ValueError, KeyError):
        return steps, False
