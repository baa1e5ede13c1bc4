"""Reader of a run folder: reads each file once, when it is first needed.

The configuration's reader imports Hydra, so it is imported only with the configuration: completion lists runs.
"""

import os
import shlex
import socket
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.number_format import format_duration
from titan_exp.tracking.run_folder.attempts import ENDED_STATES, Attempt, Heartbeat, RunState, read_json, shown_state
from titan_exp.tracking.run_folder.metrics_jsonl import MetricRows, read_last_values, read_metrics
from titan_exp.tracking.run_folder.provenance_records import (
    Ancestor,
    CodeRecord,
    Lineage,
    ancestors,
    late_values,
    read_code,
    read_environment_record,
    read_overrides,
)
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.sinks.sink import Value

if TYPE_CHECKING:
    from titan_exp.config.groups.experiment import Experiment

StatusName = Literal["new", "queued", "running", "done", "failed", "preempted", "lost", "unknown", "unreadable"]
"""`new`: never started. `queued`: in the scheduler's queue. `lost`: exited without recording its end. `unknown`: the
scheduler that may hold its job does not answer."""

STALE = 60.0
"""Seconds without a heartbeat before a run without a known holder counts as lost."""
ENDED = ("done", "failed", "preempted")
"""Recorded states that need no check of locks or heartbeat."""
SWEEP_GONE = "launcher whose sweep was killed"
"""Role of a launcher, in the run lock, that goes on although the sweep that started it is gone."""
DIED_UNRECORDED = "died without a record (killed, or the machine went down)"


@dataclass(frozen=True)
class RunStatus:
    """Current status of a run."""

    state: StatusName
    step: int
    reason: str | None
    attempt: int
    """Number of the last attempt; 0 before the first."""
    job_id: str | None = None

    @property
    def shown(self) -> str:
        """Word for the state."""
        return shown_state(self.state, self.reason)

    @property
    def active(self) -> bool:
        """True if queued or running, or unknown and thus possibly so."""
        return self.state in ("queued", "running", "unknown")


@dataclass(frozen=True)
class PredictedMetrics:
    """Predicted counterparts of measured metrics, in the units of metrics.jsonl; None if not predicted."""

    memory: float | None = None
    """Peak of rank 0 in GiB: of allocated tensors on a GPU, of the whole process on a CPU."""
    tokens_per_second: float | None = None
    """Throughput of the whole job."""


class _Prediction(TypedDict, total=False):
    memory: float | None
    tokens_per_second: float | None


class Run(os.PathLike[str]):
    """A run as its folder describes it; anybody may have written it, and it may be in any state.

    Each member reads its file once, up to the size limit of its kind, and keeps the result. To see a change, make
    another `Run`. A member raises UserError if its file is damaged.
    """

    def __init__(self, folder: "RunFolder | Run | str | os.PathLike[str]") -> None:
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))

    def __fspath__(self) -> str:
        return str(self.folder.path)

    __str__ = __fspath__

    @cached_property
    def config(self) -> dict[str, Any]:
        """Values of config.yaml, not validated. Raises UserError if there are none."""
        from titan_exp.config.schema.typed_config import read_values

        return read_values(self.folder.config)

    @cached_property
    def experiment(self) -> "Experiment":
        """Configuration for a process that trains the run, and therefore imports the code that it names."""
        from titan_exp.config.schema.typed_config import load_experiment

        return load_experiment(self.folder.config, trust=True)

    def group(self, name: str) -> Any:
        """One group of the configuration; the code that it names is not imported."""
        if "experiment" in vars(self):
            return getattr(self.experiment, name)
        from titan_exp.config.schema.typed_config import group_of

        return group_of(self.config, name, self.folder.config)

    @cached_property
    def state(self) -> RunState | None:
        """Content of state.json; if that was deleted, the last attempt's state. None before the first attempt."""
        state = self.folder.read_state()
        if state is not None or not self.attempts:
            return state
        last = self.attempts[-1]
        name = "running" if last.end is None else ENDED_STATES.get(last.exit, "failed")
        return RunState(name, 0, last.end or last.start or last.intent, last.attempt, last.reason)

    @cached_property
    def attempts(self) -> list[Attempt]:
        """All attempts, oldest first."""
        return self.folder.read_attempts()

    @cached_property
    def heartbeat(self) -> Heartbeat | None:
        """Last heartbeat; None before the first, or if it is damaged."""
        return self.folder.read_heartbeat()

    @cached_property
    def status(self) -> RunStatus:
        """Status by files and locks; if a run is not done, its scheduler may know better.

        A run without a recorded end is lost if no process holds it. If its last attempt is another machine's, whose
        locks a network disk may hide, a sign of life in the last STALE seconds counts instead.
        """
        state = self.state
        if state is None:
            return RunStatus("new", 0, None, 0)
        last = self.attempts[-1] if state.state != "done" and self.attempts else None
        job_id = None if last is None else last.job_id
        if state.state in ENDED:
            return RunStatus(state.state, state.step, state.reason, state.attempt, job_id)
        beat = self.heartbeat
        step = max(state.step, beat.step if beat and beat.time >= state.time else 0)
        if (holder := self.folder.holder()) is not None:
            reason = None if holder.role != SWEEP_GONE else self._without_sweep
            return RunStatus("running", step, reason, state.attempt, job_id)
        if last is None:
            return RunStatus("new", 0, None, 0)
        age = time.time() - max(state.time, last.intent, beat.time if beat else 0.0)
        if last.hosts != (socket.gethostname(),) and age < STALE:
            return RunStatus("running", step, None, state.attempt, job_id)
        reason = DIED_UNRECORDED
        if state.attempt:
            since = format_duration(max(0, round(age)))
            reason = f"attempt {state.attempt} {reason}, last heartbeat {since} ago"
        return RunStatus("lost", step, reason, state.attempt, job_id)

    @property
    def _without_sweep(self) -> str:
        return (
            "its sweep was killed, so the run goes on alone to its end, and no further one starts. Wait for it and "
            "type the command of the sweep again, or stop what runs: titan-exp cancel "
            f"{shlex.quote(str(self.folder.path.parent))}"
        )

    @cached_property
    def code(self) -> CodeRecord | None:
        """Code record; None if missing."""
        return read_code(self.folder.code)

    @cached_property
    def environment(self) -> dict[str, Any] | None:
        """Environment record; None if missing."""
        return read_environment_record(self.folder.env)

    @cached_property
    def overrides(self) -> tuple[str, ...] | None:
        """Overrides as typed; None if they cannot be read."""
        return read_overrides(self.folder.overrides)

    @cached_property
    def nondefault(self) -> tuple[str, ...] | None:
        """Overrides that differ from the defaults of the code that started the run; None if they cannot be read."""
        return read_overrides(self.folder.nondefault)

    @cached_property
    def ancestors(self) -> list[Ancestor]:
        """Parent, the parent's parent, and so on to the last one on this machine."""
        return list(ancestors(self.folder.path))

    @cached_property
    def lineage(self) -> Lineage | None:
        """Parent of a continued run, and the step at which it begins; None for other runs."""
        return Lineage.read(self.folder.path)

    @cached_property
    def predicted(self) -> PredictedMetrics:
        """Predictions made before the start; their values are None if plan.json is missing or damaged."""
        try:
            found = read_json(self.folder.plan, _Prediction) or {}
        except UserError:
            found = {}
        return PredictedMetrics(found.get("memory"), found.get("tokens_per_second"))

    @cached_property
    def rows(self) -> MetricRows:
        """Rows of metrics, one per step."""
        return read_metrics(self.folder.metrics)

    @cached_property
    def last_values(self) -> dict[str, Value]:
        """Latest value of every metric, read only from the end of the file, and those of work that outlives the run."""
        found = read_last_values(self.folder.metrics)
        for values in late_values(self.folder.path).values():
            found |= values
        return found
