"""Run status from files and locks, then from the executor; also rows of `titan-exp status`."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import provided
from titan_exp.config.groups.training import sequences_after
from titan_exp.launch.executor import JobStatus, WorldsSummary, executor_for, summarize_worlds, trusted_executor
from titan_exp.launch.run_lookup import RunEntry, StudyFolder, StudyRecord
from titan_exp.tracking.display import format_duration
from titan_exp.tracking.run_folder.metrics_jsonl import REPORTED, Value
from titan_exp.tracking.run_folder.run import ENDED, Run, RunStatus
from titan_exp.tracking.run_folder.run_folder import PREEMPTED, RunFolder, shown_state


def run_statuses(folders: Sequence[RunFolder | Run]) -> dict[Path, RunStatus]:
    """Status of each run by folder path. Each executor is queried once, for all its unfinished runs."""
    statuses: dict[Path, RunStatus] = {}
    unsure: dict[str, list[Run]] = {}
    for run in (found if isinstance(found, Run) else Run(found) for found in folders):
        path = run.folder.path
        try:
            statuses[path] = run.status
            if run.state is not None and run.state.state != "done" and run.attempts:
                unsure.setdefault(trusted_executor(run.folder, run.attempts[-1].launched_by), []).append(run)
        except UserError as error:
            statuses[path] = RunStatus("unreadable", 0, str(error), 0)
    for kind, of_kind in unsure.items():
        job_statuses: Mapping[Path, JobStatus] = {}
        with suppress(UserError):  # the executor's class is not importable here
            job_statuses = executor_for(kind).status([run.folder for run in of_kind])
        for run in of_kind:
            statuses[run.folder.path] = _merge(run, job_statuses.get(run.folder.path))
    return statuses


def run_status(folder: RunFolder) -> RunStatus:
    """Status of one run."""
    return run_statuses([folder])[folder.path]


def count_states(states: Sequence[str]) -> str:
    """Format counts of states: `3 done, 1 failed`."""
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _merge(run: Run, job: JobStatus | None) -> RunStatus:
    status = run.status
    if job is None:
        return status
    step, attempt, job_id = status.step, status.attempt, job.job_id or status.job_id
    if job.state == "unknown":
        last, beat = run.attempts[-1], run.heartbeat
        if status.state in ENDED and last.end is not None:
            return status
        reason = f"{last.launched_by} does not answer: {job.reason}"
        if beat is not None:
            reason += f", last heartbeat {format_duration(round(beat.age))} ago, after step {beat.step}"
        return RunStatus("unknown", step, reason, attempt, job_id)
    if job.state in ("queued", "running"):
        # Until a requeued run starts again, its files describe the previous attempt.
        return RunStatus(job.state, step, job.reason, attempt, job_id)
    if status.state in ("new", "running"):
        return RunStatus("lost", step, job.reason or "the scheduler ended or forgot its job", attempt, job_id)
    preempted = status.state == "preempted" and (job.reason or "").startswith("preempted")
    reason = f"{status.reason}; {PREEMPTED}" if preempted and status.reason else status.reason or job.reason
    return RunStatus(status.state, step, reason, attempt, job_id)


Found = TypeVar("Found")


@dataclass(frozen=True)
class StatusRow:
    """Row of the status table with the latest metrics; None if unknown."""

    label: str
    group: str  # study, or `experiment.name`
    run_id: str
    folder: str
    state: str
    step: int
    steps: int | None  # step after which the run ends
    loss: Value  # in nats per token
    tokens_per_second: Value
    mfu: Value  # from 0 to 1
    seconds_left: Value  # remaining seconds of a running run, at its latest throughput
    gpu_hours: Value  # GPU-hours of all attempts; None on CPU
    job_id: str | None
    reason: str | None
    removed: bool
    warning: str | None = None
    memory: Value = None  # peak memory of rank 0 in GiB: allocated tensors on a GPU, resident set on a CPU
    memory_predicted: Value = None
    tokens_per_second_predicted: Value = None
    validation_loss: Value = None
    parent: str | None = None  # NAME/ID or URL of the run that a continued run begins from
    parent_step: int | None = None
    rung: int | None = None
    groups: WorldsSummary | None = None
    reported: Mapping[str, Value] = field(default_factory=dict)
    """Metrics that the objective, the model, the optimizer and your own parts report, by name."""
    evaluated: Mapping[str, Value] = field(default_factory=dict)
    """Bits per byte, losses of sources and sets, and metrics of extensions at the newest evaluation, by name."""
    asked: bool = True
    tokens: Value = None

    @property
    def shown(self) -> str:
        """Word for the state."""
        return shown_state(self.state, self.reason)


def status_rows(found: Sequence[RunEntry]) -> list[StatusRow]:
    """Build the status row of each run. If a file of it is damaged, the row has the damage as its reason."""
    now, rows = run_statuses([entry.run for entry in found]), list[StatusRow]()
    for entry in found:
        path, status = entry.folder.path, now[entry.folder.path]
        try:
            rows.append(_row(entry, status))
        except UserError as error:
            known = (entry.label, entry.group, path.name, str(path), "unreadable", status.step)
            rest = (status.job_id, status.reason or str(error), entry.removed)
            rows.append(StatusRow(*known, None, None, None, None, None, None, *rest, asked=entry.asked))
    return rows


def _row(entry: RunEntry, status: RunStatus) -> StatusRow:
    run, values = entry.run, entry.run.last_values
    # Metrics may be ahead of state.json, written at the end.
    logged = int(values.get("step") or 0) if values.get("attempt") == status.attempt else 0
    step = max(status.step, logged)
    try:
        training, device = (run.config.get(group) or {} for group in ("training", "cluster"))
        steps = _count(training.get("stop_after")) or _count(training.get("steps"))
    except UserError:  # missing or damaged; `show` explains which
        training, device = {}, {}
        steps = None if entry.folder.config.exists() or entry.point is None else entry.point.steps
    on_gpu = device.get("device") == "cuda"
    if device.get("device") not in ("cpu", "cuda"):  # it is left to the machine
        on_gpu = bool((_known(lambda: run.environment) or {}).get("gpus"))
    own = training.get("parts")
    parts = [f"{name}/" for name in own] if isinstance(own, dict) else []
    evaluated = ("validation_loss/", "validation_bits_per_byte", *(f"{name}/" for name in provided("parts")))
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
        gpu_hours=_process_hours(run, status) if on_gpu else None,
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
        reported={name: value for name, value in values.items() if name.startswith((*REPORTED, *parts))},
        evaluated={name: value for name, value in values.items() if name.startswith(evaluated)},
        asked=entry.asked,
        tokens=values.get("tokens"),
    )


def _known(read: Callable[[], Found]) -> Found | None:
    """Content of a file; None if it is damaged. `show` explains the damage, and the table is also about other runs."""
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
        ramp, batch = training.batch_ramp, training.global_batch_size
        last, now, done = (sequences_after(ramp, batch, end) for end in (steps, step, int(logged)))
        left = last - now
    return left * tokens / done / speed


def _process_hours(run: Run, status: RunStatus) -> float:
    seconds = 0.0
    for row in run.attempts:
        if row.start is not None:
            end = row.end if row.end is not None else (time.time() if status.state == "running" else row.start)
            seconds += (end - row.start) * row.world_size
    return seconds / 3600


def rung_lines(record: StudyRecord, study: StudyFolder) -> Iterator[str]:
    """One line per rung: its steps, its runs' states, and the number of parents; none without halving."""
    rungs = record.rungs
    statuses = run_statuses([study.run(point) for point in record.points]) if rungs else {}
    for number in range(1, len(rungs) + 1):
        points = [point for point in record.points if point.round == number]
        name = f"rung {number} of {len(rungs)}"
        if not points:
            kept = record.rounds.get("keep")
            yield f"{name}: starts when the rung before is done, with the best {kept} of its points"
            continue
        states = count_states([statuses[study.run(point).path].shown for point in points])
        chosen = f", the best by {record.rounds.get('metric')}" if number > 1 else ""
        yield f"{name}: to step {points[0].steps}, {len(points)} run(s){chosen}: {states}"
