"""How an attempt is closed: state.json and its row in attempts.jsonl say the same."""

import contextlib
import time

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState
from titan_exp.tracking.run_folder.state import StateName

NEVER_STARTED = "its job is gone and never started"
"""Reason of a start that was submitted and came to nothing."""


def close_attempt(
    folder: RunFolder, attempt: int, state: StateName, *, exit_code: int, reason: str | None, overrule: bool
) -> None:
    """Write down how attempt number `attempt` ended.

    Args:
        folder: of the run.
        attempt: number of the start.
        state: what the run is now.
        exit_code: 0 done, 85 stopped after saving, anything else failed.
        reason: in words; None for a run that is done.
        overrule: the launcher, who has seen every rank end, replaces what a rank wrote. Among ranks the first
            failure stands, because the others fail of it.
    """
    now = folder.read_state()
    if not overrule and now is not None and now.attempt == attempt and now.state == "failed":
        return
    folder.write_state(RunState(state, last_step(folder, attempt), time.time(), attempt, reason))
    folder.update_attempt(attempt, end=time.time(), exit=exit_code, reason=reason)


def last_step(folder: RunFolder, attempt: int) -> int:
    """The last step that attempt number `attempt` is known to have done, or that it began from."""
    state, beat = folder.read_state(), folder.read_heartbeat()
    steps = [0 if state is None else state.step]
    row = next((row for row in folder.read_attempts() if row.attempt == attempt), None)
    # A heartbeat from before this start may be ahead of the checkpoint that it began from; the newest one of this
    # start may be a second old, but the last step is always logged.
    if beat is not None and row is not None and beat.time >= row.intent:
        steps.append(beat.step)
    with contextlib.suppress(UserError):  # the ending is written down even where somebody has damaged the metrics
        logged = [row for row in read_metrics(folder.metrics) if row.get("attempt") == attempt]
        steps += [int(row["step"] or 0) for row in logged[-1:]]
    return max(steps)


def close_dead_attempts(folder: RunFolder) -> None:
    """Fill in rows of attempts that nobody lived to close; the caller has claimed the folder."""
    for row in folder.read_attempts():
        if row.end is None:
            beat = folder.read_heartbeat()
            known = beat.time if beat is not None and beat.time >= row.intent else row.start or row.intent
            never = row.launched_by == "slurm" and row.start is None
            reason = NEVER_STARTED if never else "died without a word (killed, or the machine went down)"
            folder.update_attempt(row.attempt, end=known, reason=reason)
