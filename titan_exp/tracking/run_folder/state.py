"""Run state (`state.json`) and heartbeat of rank 0 (`heartbeat`)."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from titan_exp.config.errors.user_error import UserError

StateName = Literal["pending", "running", "done", "failed", "preempted"]

DONE, STOPPED, FAILED, HUNG = 0, 85, 1, 86
"""Exit codes of a rank: trained to the end; stopped after saving, on request; failed; killed by the watchdog."""
ENDED_STATES: dict[int | None, StateName] = {DONE: "done", STOPPED: "preempted"}
"""States by exit code; any other is `failed`."""


@dataclass(frozen=True)
class RunState:
    """Content of `state.json`. `running` is valid only while a process holds the run lock."""

    state: StateName
    """`pending` before the first start; `preempted` after a requested stop, resumable; `failed` with a reason."""
    step: int
    """Finished optimizer steps."""
    time: float
    """Unix time of this change."""
    attempt: int
    """Number of the attempt, from 1; 0 before the first."""
    reason: str | None
    """Reason for a failure or preemption; else None."""


@dataclass(frozen=True)
class Heartbeat:
    """Content of `heartbeat`: finished optimizer steps, the Unix time, and what a user should know meanwhile."""

    step: int
    time: float
    warning: str | None = None

    @property
    def age(self) -> float:
        """Seconds since the heartbeat."""
        return max(0.0, time.time() - self.time)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file; None if missing. Raises UserError if it is not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(
            f"{path} is not a JSON object; it was edited by hand. Remove it; the state is then derived again."
        )
    return value


def parse_state(path: Path) -> RunState | None:
    """Read a run state; None if missing. Raises UserError if it is not a run state."""
    fields = read_json(path)
    if fields is None:
        return None
    try:
        state = RunState(**fields)
    except TypeError as error:
        raise UserError(f"{path} is not a run state ({error}). Remove it; the state is then derived again.") from None
    if state.state not in get_args(StateName):
        raise UserError(f"{path}: {state.state!r} is none of {', '.join(get_args(StateName))}. Remove the file.")
    return state


def has_diverged(state: str, reason: str | None) -> bool:
    """True if a run failed because its loss was not finite, as it would again; the reason names the trainer's error."""
    return state == "failed" and ": Diverged:" in (reason or "")
