"""Close an attempt in state.json and attempts.jsonl."""

import contextlib
import time

from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.attempts import Attempt, StateName
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run import DIED_UNRECORDED
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

NEVER_STARTED = "its job is gone and never started"


def close_attempt(
    folder: RunFolder, attempt: int, state: StateName, *, exit_code: int, reason: str | None, overrule: bool
) -> None:
    """Record the end of an attempt: exit code 0 is done, 85 stopped after saving, any other failed.

    `overrule` replaces a failure recorded by a rank. The launcher and the SLURM epilogue set it, after all ranks have
    ended; among ranks the first recorded failure is kept as the cause.
    """
    now = folder.read_state()
    if not overrule and now is not None and now.attempt == attempt and now.state == "failed":
        return
    folder.write_state(RunState(state, last_step(folder, attempt), time.time(), attempt, reason))
    folder.update_attempt(attempt, end=time.time(), exit=exit_code, reason=reason)


def last_step(folder: RunFolder, attempt: int) -> int:
    """Last step that an attempt is known to have finished, or the step it resumed from."""
    state, beat = folder.read_state(), folder.read_heartbeat()
    steps = [0 if state is None else state.step]
    row = next((row for row in folder.read_attempts() if row.attempt == attempt), None)
    # An older attempt's heartbeat may be ahead of the checkpoint that this one resumed from. The newest heartbeat may
    # lag by a second, but the last step is always logged.
    if beat is not None and row is not None and beat.time >= row.intent:
        steps.append(beat.step)
    with contextlib.suppress(UserError):  # damaged metrics must not prevent the record
        logged = [row for row in read_metrics(folder.metrics) if row.get("attempt") == attempt]
        steps += [int(row["step"] or 0) for row in logged[-1:]]
    return max(steps)


def newest_checkpoint(folder: RunFolder) -> int:
    """Step of the newest complete checkpoint; 0 without one."""
    return max(CheckpointFolder(folder.checkpoints).complete_steps(), default=0)


def requeues_after(folder: RunFolder, row: Attempt) -> int:
    """Consecutive requeues without progress, once this attempt is requeued; 0 if it has written a newer checkpoint."""
    progressed = row.checkpoint is not None and newest_checkpoint(folder) > row.checkpoint
    return 0 if progressed else row.requeues + 1


def close_dead_attempts(folder: RunFolder) -> None:
    """Close attempts without a recorded end; the caller holds the run lock."""
    for row in folder.read_attempts():
        if row.end is None:
            beat = folder.read_heartbeat()
            known = beat.time if beat is not None and beat.time >= row.intent else row.start or row.intent
            unstarted = row.token is not None and row.start is None
            folder.update_attempt(row.attempt, end=known, reason=NEVER_STARTED if unstarted else DIED_UNRECORDED)
