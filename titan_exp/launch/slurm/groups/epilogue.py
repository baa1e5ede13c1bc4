"""Epilogue of a replica group's batch script: `python -m titan_exp.launch.slurm.groups.epilogue RUN_FOLDER JOB CODE`.

The group is requeued alone while another lives; else the attempt is closed.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.cluster import ClusterConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.launch.rank.rank_env import TOKEN
from titan_exp.launch.slurm.epilogue import ENDED_BY_HAND, attempt_result, own_attempt, requeue
from titan_exp.launch.slurm.groups.life import (
    Event,
    attempt_events,
    failed_starts,
    group_of_job,
    groups_lock,
    living_groups,
    started,
)
from titan_exp.launch.slurm.squeue import UnreachableError, ask, listed_jobs
from titan_exp.launch.state.close_attempt import close_attempt, newest_checkpoint
from titan_exp.launch.state.exit_status import AttemptResult
from titan_exp.tracking.run_folder.attempts import Attempt
from titan_exp.tracking.run_folder.group_events import record_event
from titan_exp.tracking.run_folder.replica_group import ReplicaGroup
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.run_folder.state import FAILED, STOPPED

AWAY = "stays away"
"""Event: the group is not requeued."""


def main(arguments: Sequence[str]) -> int:
    """Record the end of this job's start of its group; returns 85 to requeue the job, else its exit code.

    `arguments` are the run folder, the job id and srun's exit code. The run's attempt is closed only if the group has
    done its work or no other group lives.
    """
    folder, job, code = RunFolder(arguments[0]), arguments[1], int(arguments[2])
    number = group_of_job()
    if own_attempt(folder, job) is None or number is None:
        return code or FAILED
    experiment = load_experiment(folder.config, trust=True)
    cluster, size = experiment.cluster, ResolvedLayout.of(experiment).world_size
    with groups_lock(folder):
        row = folder.read_attempts()[-1]
        start = _start_of(folder, number, job)
        if start is None:
            state = folder.read_state()
            if state is not None and state.state == "done":
                return 0
            reason, attempt = f"no rank started (srun ended with exit code {code})", row.attempt
            result = AttemptResult("failed", code or FAILED, reason)
            record_event(folder, attempt, event="not started", group=number, reason=reason)
        else:
            attempt, view = start["attempt"], folder.with_group(_logs(start))
            result = attempt_result(view, replace(row, attempt=attempt, world_size=size), job, code)
            record_event(
                folder, attempt, event="ended", group=number, start=start["start"],
                exit=result.exit_code, reason=result.reason,
            )  # fmt: skip
        print(f"{folder.path}: replica group {number} {result.state} ({result.reason or 'done'})")
        if row.attempt != attempt:  # the others have opened a new attempt
            return _again(cluster)
        if row.end is not None:  # and nothing follows it
            return ENDED_BY_HAND if result.exit_code == STOPPED else result.exit_code or row.exit or 0
        # A group ends without a failure only once the last state is saved.
        if code == 0:
            return _close(folder, row, result, cluster)
        return _close_failed(folder, row, number, result, cluster)


def _close_failed(folder: RunFolder, row: Attempt, number: int, result: AttemptResult, cluster: ClusterConfig) -> int:
    """Requeue the group alone, or close the attempt; the caller holds the groups' lock."""
    events = attempt_events(folder, row.attempt)
    final = result.exit_code == UserError.exit_code or cluster.requeue == "never"
    failures = failed_starts(events, number)
    comes_back = not final and failures <= cluster.max_requeues
    others = _others(folder, row, number, events)
    needed = not comes_back and newest_checkpoint(folder) > 0 and _loads(events, number)
    if others and not needed and len(others) + comes_back >= cluster.min_groups:
        if comes_back:
            print(f"requeued alone, while groups {', '.join(map(str, sorted(others)))} train on.")
            return STOPPED
        reason = "" if final else f": {failures} starts in a row did not train (cluster.max_requeues)"
        record_event(folder, row.attempt, event=AWAY, group=number, reason=(result.reason or "") + reason)
        print(f"replica group {number} stays away{reason}; the command that submitted it submits it again.")
        return result.exit_code
    if result.exit_code == STOPPED:  # a stop request, and killed before it had saved
        return _close(folder, row, result, cluster)
    reason = f"replica group {number}, {result.reason}"
    if needed:
        reason += "; it was to load the run's checkpoint for all groups"
    elif others:
        reason += f"; fewer groups are left than cluster.min_groups={cluster.min_groups}"
    failed = replace(result, state="failed", reason=reason)
    close_attempt(folder, row.attempt, "failed", exit_code=failed.exit_code, reason=reason, overrule=True)
    _end_waiting_jobs(folder, row)
    print(failed.detail)
    return failed.exit_code


def _loads(events: Sequence[Event], number: int) -> bool:
    """True if the group was to load the checkpoint, for which others wait, and none has trained yet."""
    starts = [event for event in started(events) if event["group"] == number]
    return bool(starts) and starts[-1]["loader"] == number and all(event["event"] != "quorum" for event in events)


def _close(folder: RunFolder, row: Attempt, result: AttemptResult, cluster: ClusterConfig) -> int:
    close_attempt(folder, row.attempt, result.state, exit_code=result.exit_code, reason=result.reason, overrule=True)
    code = result.exit_code
    if code == STOPPED:
        code = requeue(folder, row, row.job_id or "", result, cluster)
    if code != STOPPED:
        _end_waiting_jobs(folder, row)
    return code


def _others(folder: RunFolder, row: Attempt, number: int, events: list[Event]) -> set[int]:
    """Other groups that train, or may, if none has trained yet."""
    newest = {event["group"]: event["event"] for event in events if event["event"] in ("started", AWAY)}
    # SLURM may still be ending the job of one that stays away.
    coming = {group for group in _jobs(row, number) if newest.get(group) != AWAY}
    living = living_groups(events, besides=number)
    if any(event["event"] == "quorum" for event in events):
        # Groups that wait in the queue count as well, once one is alive from which they can heal.
        return living and living | living_groups(events, besides=number, trained=False) | coming
    return living | coming


def _jobs(row: Attempt, number: int) -> set[int]:
    """Other groups whose jobs wait or run, by squeue; empty if it does not answer."""
    try:
        jobs = listed_jobs([os.getuid()])
    except UnreachableError:
        return set()
    tokens = [job.token for job in jobs if job.phase != "gone" and job.token.startswith(f"{row.token}_")]
    return {int(token.rpartition("_")[2]) for token in tokens} - {number}


def _end_waiting_jobs(folder: RunFolder, row: Attempt) -> None:
    """Take jobs of other groups out of the queue; those that run end by themselves."""
    try:
        jobs = listed_jobs([os.getuid()])
        waiting = [job.job_id for job in jobs if job.phase == "queued" and job.token.startswith(f"{row.token}_")]
        if waiting:
            ask("scancel", *waiting)
    except UnreachableError as error:
        print(f"{folder.path}: jobs of other groups may wait in the queue, and end when they start ({error})")


def _again(cluster: ClusterConfig) -> int:
    return FAILED if cluster.requeue == "never" else STOPPED


def _start_of(folder: RunFolder, number: int, job: str) -> Event | None:
    """This job's start, of the newest attempts."""
    own = (number, job, int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    for row in reversed(folder.read_attempts()):
        if row.token != os.environ.get(TOKEN):
            return None
        for event in started(attempt_events(folder, row.attempt)):
            if (event["group"], event["job_id"], event["restarts"]) == own:
                return event
    return None


def _logs(start: Event) -> str:
    return ReplicaGroup(start["group"], start["start"], "").logs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
