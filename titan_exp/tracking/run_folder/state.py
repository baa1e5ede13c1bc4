"""Run state (`state.json`) and heartbeat of rank 0 (`heartbeat`)."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.foreign_file import parse_json, read_file

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


def read_json(path: Path, kind: Any = dict) -> Any:
    """Read a JSON object from a file, of a type as in `of_kind`; None if missing. Raises UserError if it is none."""
    try:
        return parse_json(read_file(path), kind)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(
            f"{path} is damaged, or was edited by hand ({error}). Remove it; what it holds then counts as not recorded."
        ) from None


def has_diverged(state: str, reason: str | None) -> bool:
    """True if a run failed because its loss was not finite, as it would again; the reason names the trainer's error."""
    return state == "failed" and ": Diverged:" in (reason or "")
