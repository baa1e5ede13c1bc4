"""Living replica groups of an attempt: the newest starts without a recorded end whose agents answer."""

import os
from collections.abc import Sequence
from typing import Any

from titan_exp.launch.slurm.groups.servers import read_name
from titan_exp.tracking.run_folder.file_lock import FileLock
from titan_exp.tracking.run_folder.group_events import read_events
from titan_exp.tracking.run_folder.replica_group import ReplicaGroup
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.run_folder.state import HUNG

GROUP = "TITAN_EXP_GROUP"
"""Environment variable: number of the job's replica group; unset without groups."""
LOCK_LIMIT = 120.0
"""Seconds to wait for other groups that start or end."""

Event = dict[str, Any]


def group_of_job() -> int | None:
    """Number of this job's replica group; None without groups."""
    number = os.environ.get(GROUP)
    return None if number is None else int(number)


def groups_lock(folder: RunFolder) -> FileLock:
    """Acquire the lock under which groups start and end. Raises LockedError."""
    lock = FileLock(folder.path / ".lock.groups")
    lock.acquire("replica group", timeout=LOCK_LIMIT)
    return lock


def attempt_events(folder: RunFolder, attempt: int) -> list[Event]:
    """Events of one attempt, oldest first."""
    return [event for event in read_events(folder) if event["attempt"] == attempt]


def started(events: Sequence[Event]) -> list[Event]:
    """Starts of groups in an attempt's events, oldest first."""
    return [event for event in events if event["event"] == "started"]


def unended(events: Sequence[Event]) -> list[Event]:
    """Starts without a recorded end."""
    ended = {event["start"] for event in events if event["event"] == "ended"}
    return [event for event in started(events) if event["start"] not in ended]


def living_groups(events: Sequence[Event], *, besides: int | None = None, trained: bool = True) -> set[int]:
    """Groups whose agents answer, and with `trained` only those in a quorum, once there was one."""
    only_trained = trained and any(event["event"] == "quorum" for event in events)
    return {
        event["group"]
        for event in unended(events)
        if event["group"] != besides
        and (not only_trained or _has_trained(events, event))
        and read_name(event["host"], event["agent"]) == _name(event)
    }


def failed_starts(events: Sequence[Event], number: int) -> int:
    """Consecutive starts of a group that ended before it trained, or hung."""
    count, starts = 0, {event["start"]: event for event in started(events)}
    for event in events:
        if event.get("group") == number and event["event"] in ("ended", "not started"):
            failed = event["event"] == "not started" or event["exit"] == HUNG
            count = count + 1 if failed or not _has_trained(events, starts[event["start"]]) else 0
    return count


def _has_trained(events: Sequence[Event], start: Event) -> bool:
    return any(
        event["event"] == "quorum" and event["time"] >= start["time"] and start["group"] in event["groups"]
        for event in _until_end(events, start)
    )


def _until_end(events: Sequence[Event], start: Event) -> list[Event]:
    for place, event in enumerate(events):
        if event["event"] == "ended" and event["start"] == start["start"]:
            return list(events[:place])
    return list(events)


def _name(event: Event) -> str:
    return ReplicaGroup(event["group"], event["start"], "").logs
