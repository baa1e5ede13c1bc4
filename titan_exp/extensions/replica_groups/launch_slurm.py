"""Replica groups as tasks of one SLURM array: start, life and end of a group that has its own job. `python -m
titan_exp.extensions.replica_groups.launch_slurm leave RUN_FOLDER` decides about a group that SLURM is about to end, and
`... epilogue RUN_FOLDER JOB CODE` is the epilogue of its batch script."""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.extensions.replica_groups.agents import read_name, start_agent
from titan_exp.extensions.replica_groups.config import cluster_of
from titan_exp.extensions.replica_groups.events import ReplicaGroup, read_events, record_event
from titan_exp.launch.attempt_end import AttemptResult, close_attempt, newest_checkpoint, requeues_after
from titan_exp.launch.rank.host_agent import join_rendezvous
from titan_exp.launch.rank.rank_env import GROUP, TOKEN, RankInfo
from titan_exp.launch.slurm.epilogue import ENDED_BY_HAND, attempt_result, own_attempt, requeue
from titan_exp.launch.slurm.executor import publish_rendezvous
from titan_exp.launch.slurm.squeue import UnreachableError, ask, listed_jobs
from titan_exp.tracking.run_folder.files import FileLock
from titan_exp.tracking.run_folder.run_folder import FAILED, HUNG, STOPPED, Attempt, RunFolder, World

if TYPE_CHECKING:
    from titan_exp.extensions.replica_groups.config import GroupedCluster

Event = dict[str, Any]

LOCK_LIMIT = 120.0  # seconds to wait while other groups start or end
START_LIMIT = 180.0  # seconds that other ranks wait for rank 0 to record the group's start
PATIENCE = 3600.0
"""Seconds that a newcomer waits for a group that may be loading the checkpoint, unless the fleet is dead."""
NO_RECORD = "ended by the scheduler without a record (a node failed, or somebody requeued the job)"
AWAY = "stays away"  # event for a group that is not requeued


def join_group(folder: RunFolder, rank: RankInfo, number: int) -> tuple[RunFolder, RankInfo]:
    """Join the attempt as a rank of group `number`; returns folder and rank. Raises UserError if it is over."""
    if rank.rank == 0:
        with groups_lock(folder):
            event = _open_start(folder, rank, number)
    else:
        event = _await_start(folder, rank, number)
    group = ReplicaGroup(
        number, event["start"], event["lighthouse"], host=event["host"], loader=event["loader"], patience=PATIENCE
    )
    os.environ.update(group.to_environment())
    view, rank = folder.with_world(group.logs), replace(rank, attempt=event["attempt"])
    if rank.world_size > 1:
        join_rendezvous(view, rank)
    return view, rank


def _open_start(folder: RunFolder, rank: RankInfo, number: int) -> dict[str, Any]:
    attempt = _attempt(folder, rank)
    events = read_events(folder, attempt)
    for start in [event["start"] for event in unended(events) if event["group"] == number]:
        record_event(folder, attempt, event="ended", group=number, start=start, exit=None, reason=NO_RECORD)
    starts, living = started(events), living_groups(events, besides=number)
    loader = next((event["loader"] for event in reversed(starts) if event["loader"] in living), number)
    group = World(number, len(starts))
    view, host = folder.with_world(group.logs), socket.gethostname()
    view.make_attempt_logs(attempt)
    ports = start_agent(folder, attempt, group.logs, number)
    publish_rendezvous(view, replace(rank, attempt=attempt), host=host)
    of_group = {"group": number, "start": group.start, "job_id": rank.job_id, "restarts": rank.restarts, "host": host}
    of_agent = {"agent": ports.life_sign, "lighthouse": f"http://127.0.0.1:{ports.lighthouse}", "loader": loader}
    record_event(folder, attempt, event="started", **of_group, **of_agent)
    return started(read_events(folder, attempt))[-1]


def _attempt(folder: RunFolder, rank: RankInfo) -> int:
    """Number of the attempt to join; a new one if the last attempt's groups have died without a record."""
    rows = folder.read_attempts()
    row = rows[-1] if rows else None
    if row is None or row.token != rank.token:
        reason = f"this run was started anew after job {rank.job_id} was submitted"
        raise UserError(f"{folder.path}: {reason}, so this job ends.")
    if row.end is not None:
        reason = f" ({row.reason})" if row.reason else ""
        raise UserError(f"{folder.path}: attempt {row.attempt} has ended{reason}, so job {rank.job_id} ends too.")
    if row.start is not None:
        events = read_events(folder, row.attempt)
        trained = any(event["event"] == "quorum" for event in events)
        if not trained or living_groups(events):
            return row.attempt
        folder.update_attempt(row.attempt, end=time.time(), reason=f"all replica groups {NO_RECORD}")
        kept: Event = {"world_size": row.world_size, "job_id": row.job_id, "launched_by": row.launched_by}
        row = folder.add_attempt(hosts=(), token=row.token, requeues=requeues_after(folder, row), **kept)
    if folder.stop.exists() and folder.stop.stat().st_mtime < row.intent:
        folder.clear_stop()
    known = {"job_id": rank.job_id.partition("_")[0], "hosts": rank.hosts, "restarts": rank.restarts}
    folder.update_attempt(row.attempt, **known, checkpoint=newest_checkpoint(folder), start=time.time())
    return row.attempt


def _await_start(folder: RunFolder, rank: RankInfo, number: int) -> dict[str, Any]:
    deadline, own = time.monotonic() + START_LIMIT, (number, rank.job_id, rank.restarts)
    while time.monotonic() < deadline:
        rows = folder.read_attempts()
        for event in started(read_events(folder, rows[-1].attempt)) if rows else ():
            if (event["group"], event["job_id"], event["restarts"]) == own:
                return event
        time.sleep(0.1)
    raise UserError(f"{folder.path}: rank 0 did not start within {START_LIMIT:.0f} s. See its log.")


def groups_lock(folder: RunFolder) -> FileLock:
    """Acquire the lock that groups hold while they start and end. Raises LockedError."""
    lock = FileLock(folder.path / ".lock.groups")
    lock.acquire("replica group", timeout=LOCK_LIMIT)
    return lock


def started(events: Sequence[Event]) -> list[Event]:
    """Starts of groups in an attempt's events, oldest first."""
    return [event for event in events if event["event"] == "started"]


def unended(events: Sequence[Event]) -> list[Event]:
    """Starts without a recorded end."""
    ended = {event["start"] for event in events if event["event"] == "ended"}
    return [event for event in started(events) if event["start"] not in ended]


def living_groups(events: Sequence[Event], *, besides: int | None = None, trained: bool = True) -> set[int]:
    """Groups whose agents answer; with `trained`, only those that were in a quorum, once there was one."""
    only_trained = trained and any(event["event"] == "quorum" for event in events)
    return {
        event["group"]
        for event in unended(events)
        if event["group"] != besides
        and (not only_trained or _has_trained(events, event))
        and read_name(event["host"], event["agent"]) == _name(event)
    }


def failed_starts(events: Sequence[Event], number: int) -> int:
    """Number of a group's consecutive starts that ended before it trained, or hung."""
    count, starts = 0, {event["start"]: event for event in started(events)}
    for event in events:
        if event.get("group") == number and event["event"] in ("ended", "not started"):
            failed = event["event"] == "not started" or event["exit"] == HUNG
            count = count + 1 if failed or not _has_trained(events, starts[event["start"]]) else 0
    return count


def _has_trained(events: Sequence[Event], start: Event) -> bool:
    for event in events:
        if event["event"] == "ended" and event["start"] == start["start"]:
            return False
        if event["event"] == "quorum" and event["time"] >= start["time"] and start["group"] in event["groups"]:
            return True
    return False


def _name(start: Event) -> str:
    return World(start["group"], start["start"]).logs


def leave(arguments: Sequence[str]) -> int:
    """Return 0 if this job's group leaves alone, 1 if the run should stop. The argument is the run folder. It leaves
    alone if other groups train on, since they need none of its state. The last group asks the run to save and stop."""
    folder, number = RunFolder(arguments[0]), int(os.environ[GROUP])
    with groups_lock(folder):
        attempt = folder.read_attempts()[-1].attempt
        events = read_events(folder, attempt)
        newest = {event["group"]: event["event"] for event in events if event["event"] in ("started", "leaves")}
        staying = {group for group in living_groups(events, besides=number) if newest[group] == "started"}
        if folder.stop_requested() or len(staying) < cluster_of(load_experiment(folder.config, trust=True)).min_groups:
            return 1
        # It is recorded under the lock, so that exactly one of the groups at their time limit is the last.
        record_event(folder, attempt, event="leaves", group=number)
    return 0


def epilogue(arguments: Sequence[str]) -> int:
    """Record the end of this job's start of its group; returns 85 to requeue the job, else its exit code. `arguments`
    are the run folder, the job id and srun's exit code. While another group lives, this one is requeued alone. The
    run's attempt is closed only if the group has finished, or no other lives."""
    folder, job, code = RunFolder(arguments[0]), arguments[1], int(arguments[2])
    number = int(os.environ[GROUP])
    if own_attempt(folder, job) is None:
        return code or FAILED
    experiment = load_experiment(folder.config, trust=True)
    cluster, size = cluster_of(experiment), ResolvedLayout.of(experiment).world_size
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
            attempt, view = start["attempt"], folder.with_world(_name(start))
            result = attempt_result(view, replace(row, attempt=attempt, world_size=size), job, code)
            ended = {"start": start["start"], "exit": result.exit_code, "reason": result.reason}
            record_event(folder, attempt, event="ended", group=number, **ended)
        print(f"{folder.path}: replica group {number} {result.state} ({result.reason or 'done'})")
        if row.attempt != attempt:  # the other groups have opened a new attempt
            return FAILED if cluster.requeue == "never" else STOPPED
        if row.end is not None:  # and nothing follows this end
            return ENDED_BY_HAND if result.exit_code == STOPPED else result.exit_code or row.exit or 0
        # A group ends without a failure only once the last state is saved.
        if code == 0:
            return _close(folder, row, result, cluster)
        return _close_failed(folder, row, number, result, cluster)


def _close_failed(
    folder: RunFolder, row: Attempt, number: int, result: AttemptResult, cluster: "GroupedCluster"
) -> int:
    """Requeue the group alone, or close the attempt; the caller holds the groups' lock."""
    events = read_events(folder, row.attempt)
    final = result.exit_code == UserError.exit_code or cluster.requeue == "never"
    failures = failed_starts(events, number)
    comes_back = not final and failures <= cluster.max_requeues
    others = _others(folder, row, number, events)
    # The group was to load the checkpoint, for which others wait, and no group has trained yet.
    starts = [event for event in started(events) if event["group"] == number]
    loads = bool(starts) and starts[-1]["loader"] == number and all(event["event"] != "quorum" for event in events)
    needed = not comes_back and newest_checkpoint(folder) > 0 and loads
    if others and not needed and len(others) + comes_back >= cluster.min_groups:
        if comes_back:
            print(f"requeued alone, while groups {', '.join(map(str, sorted(others)))} train on.")
            return STOPPED
        reason = "" if final else f": {failures} starts in a row did not train (cluster.max_requeues)"
        record_event(folder, row.attempt, event=AWAY, group=number, reason=(result.reason or "") + reason)
        print(f"Replica group {number} stays away{reason}. To bring it back, run the command that submitted it again.")
        return result.exit_code
    if result.exit_code == STOPPED:  # there was a stop request, and the group was killed before it had saved
        return _close(folder, row, result, cluster)
    reason = f"replica group {number}, {result.reason}"
    if needed:
        reason += ", and it should have loaded the run's checkpoint for all groups"
    elif others:
        reason += f", and fewer groups are left than cluster.min_groups={cluster.min_groups}"
    failed = replace(result, state="failed", reason=reason)
    close_attempt(folder, row.attempt, failed)
    _end_waiting_jobs(folder, row)
    print(failed.detail)
    return failed.exit_code


def _close(folder: RunFolder, row: Attempt, result: AttemptResult, cluster: "GroupedCluster") -> int:
    close_attempt(folder, row.attempt, result)
    code = result.exit_code
    if code == STOPPED:
        code = requeue(folder, row, row.job_id or "", result, cluster)
    if code != STOPPED:
        _end_waiting_jobs(folder, row)
    return code


def _others(folder: RunFolder, row: Attempt, number: int, events: list[Event]) -> set[int]:
    """Other groups that train; if none has trained yet, those that may."""
    newest = {event["group"]: event["event"] for event in events if event["event"] in ("started", AWAY)}
    # SLURM may still be ending the job of a group that stays away.
    coming, tokens = set[int](), list[str]()
    with contextlib.suppress(UnreachableError):  # of squeue
        tokens = [job.token for job in listed_jobs([os.getuid()]) if job.phase != "gone"]
    for group in [int(token.rpartition("_")[2]) for token in tokens if token.startswith(f"{row.token}_")]:
        if group != number and newest.get(group) != AWAY:
            coming.add(group)
    living = living_groups(events, besides=number)
    if any(event["event"] == "quorum" for event in events):
        # Groups that wait in the queue count as well, once a living group exists from which they can heal.
        return living and living | living_groups(events, besides=number, trained=False) | coming
    return living | coming


def _end_waiting_jobs(folder: RunFolder, row: Attempt) -> None:
    """Remove waiting jobs of other groups from the queue; running jobs end on their own."""
    try:
        jobs = listed_jobs([os.getuid()])
        waiting = [job.job_id for job in jobs if job.phase == "queued" and job.token.startswith(f"{row.token}_")]
        if waiting:
            ask("scancel", *waiting)
    except UnreachableError as error:
        print(f"{folder.path}: jobs of other groups may still wait in the queue. They end when they start ({error})")


def _start_of(folder: RunFolder, number: int, job: str) -> Event | None:
    """Start of this job, in the newest attempts."""
    own = (number, job, int(os.environ.get("SLURM_RESTART_COUNT", "0")))
    for row in reversed(folder.read_attempts()):
        if row.token != os.environ.get(TOKEN):
            return None
        for event in started(read_events(folder, row.attempt)):
            if (event["group"], event["job_id"], event["restarts"]) == own:
                return event
    return None


if __name__ == "__main__":
    sys.exit({"leave": leave, "epilogue": epilogue}[sys.argv[1]](sys.argv[2:]))
