"""What a run is doing, in two small files: state.json, and the heartbeat of its rank 0."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from titan_exp.config.errors.user_error import UserError

StateName = Literal["pending", "running", "done", "failed", "preempted"]

DONE, STOPPED, FAILED, HUNG = 0, 85, 1, 86
"""Exit codes of a rank: trained to the end; saved because a stop was requested; an error; no progress any more."""


@dataclass(frozen=True)
class RunState:
    """The content of state.json. `running` holds only while somebody holds the folder's lock; else the run is dead."""

    state: StateName
    """`pending` before its first start; `preempted` stopped after saving and may go on; `failed` says why."""
    step: int
    """Optimizer steps done."""
    time: float
    """Unix time of this change."""
    attempt: int
    """Number of the start that this is about, from 1; 0 before the first."""
    reason: str | None
    """Why it failed or was preempted; None otherwise."""


@dataclass(frozen=True)
class Heartbeat:
    """The content of `heartbeat`."""

    step: int
    """Optimizer steps done."""
    time: float
    """Unix time."""

    @property
    def age(self) -> float:
        """Seconds since then."""
        return max(0.0, time.time() - self.time)


def read_json(path: Path) -> dict[str, Any] | None:
    """An object from a JSON file; None where there is no file.

    Raises:
        UserError: the file holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object: it was changed by hand. Remove it; the run is looked at anew.")
    return value


def parse_state(path: Path) -> RunState | None:
    """The state in the file at `path`; None where there is no file.

    Raises:
        UserError: the file holds something else.
    """
    fields = read_json(path)
    if fields is None:
        return None
    try:
        state = RunState(**fields)
    except TypeError as error:
        raise UserError(
            f"{path} does not hold a run's state ({error}). Remove it; the run is looked at anew."
        ) from None
    if state.state not in get_args(StateName):
        raise UserError(f"{path}: {state.state!r} is none of {', '.join(get_args(StateName))}. Remove the file.")
    return state
