"""Start of a replica group in a job of its own: it joins the run's attempt, or opens one if no group lives."""

import os
import socket
import time
from dataclasses import replace
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.rank.join_attempt import check_world_size
from titan_exp.launch.rank.rank_env import RankInfo
from titan_exp.launch.rank.rendezvous import join_rendezvous
from titan_exp.launch.slurm.groups.agent import start_agent
from titan_exp.launch.slurm.groups.life import attempt_events, groups_lock, living_groups, started, unended
from titan_exp.launch.slurm.rendezvous import publish_rendezvous
from titan_exp.launch.state.close_attempt import newest_checkpoint, requeues_after
from titan_exp.tracking.run_folder.attempts import Attempt
from titan_exp.tracking.run_folder.group_events import record_event
from titan_exp.tracking.run_folder.replica_group import ReplicaGroup
from titan_exp.tracking.run_folder.run_folder import RunFolder

START_LIMIT = 180.0
"""Seconds that other ranks wait for rank 0 to record the group's start."""
PATIENCE = 3600.0
"""Seconds that a newcomer waits for a group that may be loading the checkpoint; it ends before if the fleet is dead."""
NO_RECORD = "ended by the scheduler without a record (node failure, or requeued by hand)"


def join_group(folder: RunFolder, rank: RankInfo, number: int) -> tuple[RunFolder, RankInfo]:
    """Join the run's attempt as a rank of group `number`; returns the folder as its ranks see it, and the rank.

    Raises UserError if the attempt is over, the run was started anew, or the number of ranks differs from the layout.
    """
    if rank.rank == 0:
        with groups_lock(folder):
            event = _open_start(folder, rank, number)
    else:
        event = _await_start(folder, rank, number)
    group = ReplicaGroup(
        number, event["start"], event["lighthouse"], host=event["host"], loader=event["loader"], patience=PATIENCE
    )
    os.environ.update(group.to_environment())
    view, rank = folder.with_group(group.logs), replace(rank, attempt=event["attempt"])
    if rank.world_size > 1:
        join_rendezvous(view, rank)
    return view, rank


def _open_start(folder: RunFolder, rank: RankInfo, number: int) -> dict[str, Any]:
    check_world_size(folder, rank)
    attempt = _attempt(folder, rank)
    events = attempt_events(folder, attempt)
    for event in unended(events):
        if event["group"] == number:
            record_event(
                folder, attempt, event="ended", group=number, start=event["start"], exit=None, reason=NO_RECORD
            )
    starts, living = started(events), living_groups(events, besides=number)
    loader = next((event["loader"] for event in reversed(starts) if event["loader"] in living), number)
    group = ReplicaGroup(number, len(starts), "")
    view, host = folder.with_group(group.logs), socket.gethostname()
    view.make_attempt_logs(attempt)
    ports = start_agent(folder, attempt, group.logs, number)
    publish_rendezvous(view, replace(rank, attempt=attempt), host=host)
    record_event(
        folder,
        attempt,
        event="started",
        group=number,
        start=group.start,
        job_id=rank.job_id,
        restarts=rank.restarts,
        host=host,
        agent=ports.life_sign,
        lighthouse=f"http://127.0.0.1:{ports.lighthouse}",
        loader=loader,
    )
    return started(attempt_events(folder, attempt))[-1]


def _attempt(folder: RunFolder, rank: RankInfo) -> int:
    """Number of the attempt to join; a new one if the groups of the last have died without a record."""
    rows = folder.read_attempts()
    row = rows[-1] if rows else None
    if row is None or row.token != rank.token:
        raise UserError(f"{folder.path}: this run was started anew after job {rank.job_id} was submitted; it ends.")
    if row.end is not None:
        reason = f" ({row.reason})" if row.reason else ""
        raise UserError(f"{folder.path}: attempt {row.attempt} has ended{reason}, and job {rank.job_id} with it.")
    if row.start is not None:
        events = attempt_events(folder, row.attempt)
        trained = any(event["event"] == "quorum" for event in events)
        if not trained or living_groups(events):
            return row.attempt
        folder.update_attempt(row.attempt, end=time.time(), reason=f"all replica groups {NO_RECORD}")
        row = _add_attempt(folder, row)
    if folder.stop.exists() and folder.stop.stat().st_mtime < row.intent:
        folder.clear_stop()
    known = {"job_id": rank.job_id.partition("_")[0], "hosts": rank.hosts, "restarts": rank.restarts}
    folder.update_attempt(row.attempt, **known, checkpoint=newest_checkpoint(folder), start=time.time())
    return row.attempt


def _add_attempt(folder: RunFolder, row: Attempt) -> Attempt:
    return folder.add_attempt(
        world_size=row.world_size,
        hosts=(),
        job_id=row.job_id,
        launched_by=row.launched_by,
        token=row.token,
        requeues=requeues_after(folder, row),
    )


def _await_start(folder: RunFolder, rank: RankInfo, number: int) -> dict[str, Any]:
    deadline, own = time.monotonic() + START_LIMIT, (number, rank.job_id, rank.restarts)
    while time.monotonic() < deadline:
        rows = folder.read_attempts()
        for event in started(attempt_events(folder, rows[-1].attempt)) if rows else ():
            if (event["group"], event["job_id"], event["restarts"]) == own:
                return event
        time.sleep(0.1)
    raise UserError(f"{folder.path}: rank 0 did not start within {START_LIMIT:.0f} s. See its log.")
