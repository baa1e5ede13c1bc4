"""Run record: configuration, metrics and state of one run, read from its folder or W&B."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.plan.gate.predicted import PredictedMetrics, read_predicted_metrics
from titan_exp.tracking.run_folder.lineage import Lineage, read_history
from titan_exp.tracking.run_folder.run_folder import Attempt, RunFolder
from titan_exp.tracking.run_folder.state import read_json
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
    """Wall-clock time of all attempts."""
    device_seconds: float | None
    """Wall-clock time times processes, over all attempts."""
    device: str | None
    """GPU or CPU name."""
    commit: str | None
    dirty: bool | None
    """True if the code differed from the commit."""
    overrides: tuple[str, ...]
    source: str
    """Folder or URL."""
    predicted: PredictedMetrics = field(default_factory=PredictedMetrics)
    """Predictions made before the start."""

    @property
    def seed(self) -> int | None:
        """Seed of initial weights and data order."""
        return self.config.get("experiment", {}).get("seed")

    @property
    def tokens(self) -> int:
        """Tokens of the whole job at the last row; 0 without rows."""
        return int(next((row["tokens"] for row in reversed(self.rows) if row.get("tokens")), 0) or 0)

    @property
    def step(self) -> int:
        """Optimizer steps at the last row."""
        return int(self.rows[-1]["step"] or 0) if self.rows else 0

    def series(self, key: str, up_to: float = math.inf) -> tuple[list[float], list[float]]:
        """Known values of a metric with their token counts, up to `up_to` tokens."""
        known = [
            (float(row["tokens"] or 0), float(value))
            for row in self.rows
            if (value := row.get(key)) is not None and row.get("tokens") is not None and (row["tokens"] or 0) <= up_to
        ]
        return [tokens for tokens, _ in known], [value for _, value in known]


def read_run(path: str | Path) -> Run:
    """Read a run folder in any state. Raises UserError if it has no configuration or a damaged file."""
    folder = RunFolder(path)
    config = _read_config(folder.config)
    code = read_json(folder.code) or {}
    attempts = folder.read_attempts()
    rows = read_history(folder.path)
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
        # Rows of a continued run include its parent's, whose seconds do not count here.
        seconds=sum(seconds for _, seconds in known) if known and Lineage.read(folder.path) is None else None,
        device_seconds=sum(seconds * attempt.world_size for attempt, seconds in known) if known else None,
        device=_device(folder.env),
        commit=code.get("commit"),
        dirty=any(part["dirty"] for part in code.get("imported", ())) or code.get("dirty"),
        overrides=_read_overrides(folder.overrides),
        source=str(path),
        predicted=read_predicted_metrics(folder),
    )


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


def _read_config(path: Path) -> dict[str, Any]:
    import yaml

    # Not validated, so that configurations of older versions can be compared.
    try:
        values = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} contains no configuration.")
    return values


def _read_overrides(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple(str(json.loads(line[2:])) for line in lines if line.startswith("- "))
    except (OSError, ValueError):
        return ()


def _device(path: Path) -> str | None:
    try:
        found = read_json(path) or {}
    except UserError:
        return None
    gpus = [str(gpu.get("name")) for gpu in found.get("gpus") or [] if isinstance(gpu, dict)]
    return ", ".join(dict.fromkeys(gpus)) or found.get("cpu")
