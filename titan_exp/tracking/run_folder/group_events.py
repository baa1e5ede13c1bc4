"""groups.jsonl: starts and ends of replica groups and of the lighthouse, and the quorums between them."""

import json
import os
import time
from dataclasses import dataclass
from typing import Any

from titan_exp.config.paths.group_history import read_group_events
from titan_exp.config.secrets.variables import concealed
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.metrics_jsonl import read_all_rows, read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder


def record_event(folder: RunFolder, attempt: int, *, event: str, **fields: Any) -> None:
    """Append an event; an error is logged and ends nothing."""
    line = json.dumps({"time": time.time(), "attempt": attempt, "event": event, **fields})
    try:
        # One write in append mode: the launcher and the leading group share the file.
        descriptor = os.open(folder.groups, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(descriptor, f"{concealed(line)}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        get_logger().error("%s cannot be written (%s)", folder.groups, error.strerror or error)


def read_events(folder: RunFolder) -> list[dict[str, Any]]:
    """Events of all attempts, oldest first; torn and damaged lines are left out."""
    return list(read_group_events(folder.groups))


def newest_quorum(folder: RunFolder) -> list[int]:
    """Numbers of the groups of the newest quorum; none before the first."""
    quorums = [event for event in read_events(folder) if event["event"] == "quorum"]
    return quorums[-1]["groups"] if quorums else []


@dataclass(frozen=True)
class GroupSummary:
    """What happened to the replica groups of a run, in all attempts."""

    living: int
    """Groups of the newest quorum."""
    groups: int
    """All groups."""
    quorum: int | None
    """Number of the newest quorum; None before the first."""
    heals: int
    """Groups that took over the state of another."""
    stall: float
    """Seconds that training waited for other groups or computed a step again."""
    restarts: float
    """Seconds from a start of the whole fleet to its first quorum, and of the steps that it computed again, over all
    attempts but the first."""

    @property
    def lost(self) -> float:
        """Seconds lost to failures."""
        return self.stall + self.restarts


def summarize_groups(folder: RunFolder) -> GroupSummary | None:
    """Summary of the run's replica groups; None without any."""
    events = read_events(folder)
    if not events:
        return None
    quorums = [event for event in events if event["event"] == "quorum"]
    newest = quorums[-1] if quorums else {"groups": [], "quorum": None}
    rows = read_metrics(folder.metrics)
    stalls = [float(stall or 0.0) for stall in rows.column("stall")]
    return GroupSummary(
        living=len(newest["groups"]),
        groups=len({event["group"] for event in events if event["event"] == "started"}),
        quorum=newest["quorum"],
        heals=sum(len(event["joined"]) for event in quorums if event["step"]),
        stall=sum(stalls),
        restarts=_restart_seconds(folder, quorums) + _repeated_seconds(folder),
    )


def _restart_seconds(folder: RunFolder, quorums: list[dict[str, Any]]) -> float:
    """Seconds from the starts of attempts after the first to their first quorums."""
    starts = {attempt.attempt: attempt.start or attempt.intent for attempt in folder.read_attempts()[1:]}
    first: dict[int, float] = {}
    for event in quorums:
        first.setdefault(event["attempt"], event["time"])
    return sum(max(0.0, first[number] - start) for number, start in starts.items() if number in first)


def _repeated_seconds(folder: RunFolder) -> float:
    """Seconds of logged steps that a later attempt trained again."""
    seconds: dict[int, float] = {}
    lost, before = 0.0, 0
    for row in read_all_rows(folder.metrics):
        step = int(row["step"] or 0)
        steps = [known for known in seconds if known >= step]
        lost += sum(seconds.pop(known) for known in steps)
        before = 0 if steps and not seconds else max(seconds, default=before)
        seconds[step] = float(row.get("step_time_median") or 0.0) * (step - before)
    return lost
