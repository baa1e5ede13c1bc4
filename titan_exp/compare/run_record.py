"""Run record: configuration, metrics and state of one run, read from its folder or W&B."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.typed_config import read_values
from titan_exp.launch.worlds import summarize_worlds
from titan_exp.plan.gate.predicted import PredictedMetrics, read_predicted_metrics
from titan_exp.tracking.run_folder.lineage import Lineage, ancestors, read_history
from titan_exp.tracking.run_folder.metric_rows import MetricRows
from titan_exp.tracking.run_folder.overrides import read_overrides
from titan_exp.tracking.run_folder.provenance_records import read_code, read_environment_record
from titan_exp.tracking.run_folder.run_folder import Attempt, RunFolder
from titan_exp.tracking.sinks.sink import Row

SILENCE = 120.0
"""Seconds without a heartbeat before a running run without a visible lock counts as lost."""


@dataclass(frozen=True)
class Run:
    """One run, finished or not; unknown fields are None."""

    study: str
    """`experiment.name`, the parent folder's name, or the W&B group."""
    run_id: str
    experiment_id: str | None
    state: str
    """`pending`, `running`, `done`, `failed`, `preempted`, or `lost` (recorded as running, without lock or
    heartbeat)."""
    reason: str | None
    config: Mapping[str, Any]
    """Resolved configuration, nested."""
    rows: Sequence[Row]
    world_size: int | None
    seconds: float | None
    """Wall-clock time of all attempts, without those of parents."""
    device_seconds: float | None
    """Wall-clock time times processes, over all attempts, without those of parents."""
    device: str | None
    """GPU or CPU name."""
    commit: str | None
    dirty: bool | None
    """True if the code differed from the commit."""
    overrides: tuple[str, ...]
    source: str
    """Folder or URL."""
    lost_seconds: float | None = None
    """Seconds lost to failures of worlds, over all attempts; None if the run has one."""
    predicted: PredictedMetrics = field(default_factory=PredictedMetrics)
    """Predictions made before the start."""
    lineage: Lineage | None = None
    """Parent and step of a continued run, whose `rows` begin with its parent's."""
    parent: "Run | None" = None
    """Parent of a continued run; None if it is not on this machine."""

    @property
    def seed(self) -> int | None:
        """Seed of initial weights and data order."""
        return self.config.get("experiment", {}).get("seed")

    @property
    def begins(self) -> int:
        """Tokens that its parents had trained on when a run was continued; 0 for other runs."""
        return 0 if self.lineage is None else self.lineage.tokens

    @property
    def tokens(self) -> int:
        """Tokens of the whole job at the last row; 0 without rows."""
        return int(next((tokens for row in reversed(self.rows) if (tokens := row.get("tokens"))), 0) or 0)

    @property
    def step(self) -> int:
        """Optimizer steps at the last row."""
        return int(self.rows[-1]["step"] or 0) if self.rows else 0

    def series(self, key: str, up_to: float = math.inf, *, above: float = -1.0) -> tuple[list[float], list[float]]:
        """Known values of a metric with their token counts, above `above` and up to `up_to` tokens."""
        if isinstance(self.rows, MetricRows):
            return self.rows.series(key, "tokens", above=above, up_to=up_to)
        known = [
            (float(tokens), float(value))
            for row in self.rows
            if (value := row.get(key)) is not None
            and (tokens := row.get("tokens")) is not None
            and above < tokens <= up_to
        ]
        return [tokens for tokens, _ in known], [value for _, value in known]


def read_run(path: str | Path) -> Run:
    """Read a run folder in any state. Raises UserError if it has no configuration or a damaged file."""
    folder = RunFolder(path)
    config = read_values(folder.config)
    code = read_code(folder.code) or {}
    attempts = folder.read_attempts()
    rows = read_history(folder.path)
    ancestor = next(ancestors(folder.path), None)
    state, reason = _state(folder)
    alive = state in ("running", "lost")
    spans = [
        (attempt, _seconds(attempt, folder if alive and attempt is attempts[-1] else None)) for attempt in attempts
    ]
    known = [(attempt, seconds) for attempt, seconds in spans if seconds is not None]
    return Run(
        study=str((config.get("experiment") or {}).get("name") or folder.path.resolve().parent.name),
        run_id=code.get("run_id") or folder.path.resolve().name,
        experiment_id=code.get("experiment_id"),
        state=state,
        reason=reason,
        config=config,
        rows=rows,
        world_size=attempts[-1].world_size if attempts else None,
        seconds=sum(seconds for _, seconds in known) if known else None,
        device_seconds=sum(seconds * attempt.world_size for attempt, seconds in known) if known else None,
        device=_device(folder.env),
        commit=code.get("commit"),
        dirty=any(part.get("dirty") for part in code.get("imported", ())) or code.get("dirty"),
        overrides=read_overrides(folder.overrides) or (),
        source=str(path),
        lost_seconds=None if (worlds := summarize_worlds(folder)) is None else worlds.lost,
        predicted=read_predicted_metrics(folder),
        lineage=None if ancestor is None else ancestor.lineage,
        parent=None if ancestor is None or ancestor.folder is None else _read_parent(ancestor.folder),
    )


def _read_parent(folder: Path) -> Run | None:
    with suppress(UserError):  # removed in part: its cost is unknown
        return read_run(folder)
    return None


def _state(folder: RunFolder) -> tuple[str, str | None]:
    state = folder.read_state()
    if state is None:
        return "pending", "never started"
    if state.state != "running" or folder.holder() is not None:
        return state.state, state.reason
    beat = folder.read_heartbeat()
    # Locks of another machine may be invisible here; heartbeats are not.
    if beat is not None and beat.age < SILENCE:
        return "running", None
    return "lost", "recorded as running, but its folder is not locked and its heartbeat has stopped"


def _seconds(attempt: Attempt, living: RunFolder | None) -> float | None:
    if attempt.start is None:
        return None
    if attempt.end is not None:
        return max(0.0, attempt.end - attempt.start)
    beat = living.read_heartbeat() if living else None
    return max(0.0, min(beat.time, time.time()) - attempt.start) if beat else None


def _device(path: Path) -> str | None:
    try:
        found = read_environment_record(path) or {}
    except UserError:
        return None
    gpus = [str(gpu.get("name")) for gpu in found.get("gpus") or []]
    return ", ".join(dict.fromkeys(gpus)) or found.get("cpu")
