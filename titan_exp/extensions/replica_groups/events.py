"""groups.jsonl: starts and ends of replica groups and of the lighthouse, and the quorums between them. Its readers are
the replay of a history, the summary in tables, and the console."""

import contextlib
import json
import os
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import of_kind, parse_json, read_lines
from titan_exp.config.secrets import concealed
from titan_exp.launch.executor import WorldsSummary
from titan_exp.tracking.display import format_duration
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.files import FileTail
from titan_exp.tracking.run_folder.metrics_jsonl import read_all_rows, read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder, World


@dataclass(frozen=True)
class ReplicaGroup(World):
    """One start of a replica group; the launcher hands it to the ranks through the environment."""

    lighthouse: str  # address of the lighthouse, with its scheme
    host: str = "127.0.0.1"  # host name or address under which other groups reach this one
    loader: int = 0  # number of the group that loads the run's checkpoint before the attempt's first step
    patience: float = 0.0  # minimum seconds that a newcomer waits for a group with the run's newest step

    def to_environment(self) -> dict[str, str]:
        """Environment variables for the ranks. They also silence torchft, which logs several lines in every step."""
        return {**super().to_environment(), "RUST_LOG": os.environ.get("RUST_LOG", "warn")}


def replica_id(group: ReplicaGroup, joined: float) -> str:
    """Name in quorums of a group that first joined at a Unix time. They sort by age, and none is given twice."""
    return f"{int(joined * 1e6):018d}-{group.start}-{group.number}"


def group_number(name: str) -> int:
    """Number of the group with a name from `replica_id`."""
    return int(name.rpartition("-")[2])


class GroupEvent(TypedDict):
    """Fields that every event in groups.jsonl has."""

    event: str
    attempt: int
    time: float


class Quorum(GroupEvent):
    """Fields of a quorum."""

    step: int
    quorum: int
    groups: list[int]
    joined: list[int]


class OfGroup(GroupEvent):
    """Fields of an event of one group: all others but `lighthouse started`."""

    group: int
    start: NotRequired[int]


KINDS = {"quorum": Quorum, "lighthouse started": GroupEvent}


def record_event(folder: RunFolder, attempt: int, *, event: str, **fields: Any) -> None:
    """Append an event; an error is logged and stops nothing."""
    path = _path(folder)
    line = json.dumps({"time": time.time(), "attempt": attempt, "event": event, **fields})
    try:
        # One write in append mode: the launcher and the leading group share the file.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(descriptor, f"{concealed(line)}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        get_logger().error("could not write %s (%s)", path, error.strerror or error)


def read_events(folder: RunFolder, attempt: int | None = None) -> list[dict[str, Any]]:
    """Read events of one attempt or of all, oldest first; torn and damaged lines are left out."""
    events = []
    with contextlib.suppress(FileNotFoundError):
        for line in read_lines(_path(folder)):
            with contextlib.suppress(ValueError):
                event = parse_json(line, GroupEvent)
                events.append(of_kind(KINDS.get(event["event"], OfGroup), event))
    return [event for event in events if attempt in (None, event["attempt"])]


def newest_quorum(folder: RunFolder) -> list[int]:
    """Numbers of the groups in the newest quorum; none before the first."""
    quorums = [event for event in read_events(folder) if event["event"] == "quorum"]
    return quorums[-1]["groups"] if quorums else []


def _path(folder: RunFolder) -> Path:
    return folder.path / "groups.jsonl"


class GroupHistory:
    """Number of groups that divided each step that a run kept. Steps after the last quorum are divided like the last
    one. Group j of n takes the micro-batches j, j + n, j + 2n and so on, and all groups hold the same weights. So the
    number of groups, not their names, determines the sums of a step, bit by bit."""

    def __init__(self, run_folder: str | Path) -> None:
        self._path = Path(run_folder).expanduser()
        self._steps: list[int] = []
        """Steps committed before each change, ascending."""
        self._groups: list[int] = []
        for event in read_events(RunFolder(self._path)):
            if event["event"] == "quorum":
                # A quorum after an earlier step, or the same, replaces later ones: a refused step is repeated, and a
                # later attempt begins at its checkpoint.
                first = bisect_left(self._steps, event["step"])
                self._steps[first:], self._groups[first:] = [event["step"]], [len(event["groups"])]

    @property
    def largest(self) -> int:
        """Largest number of groups in a step; 0 if the run had no quorum."""
        return max(self._groups, default=0)

    def groups_of(self, step: int) -> int:
        """Number of groups that divided a step, from 1. Raises UserError if the history begins later."""
        index = bisect_left(self._steps, step) - 1
        if index < 0:
            raise UserError(
                f"cluster.group_history={self._path}: its replica groups begin after step {step}, so we cannot replay "
                "this step. Give the run that trained it, or use cluster.group_history=null."
            )
        return self._groups[index]


@dataclass(frozen=True)
class GroupSummary(WorldsSummary):
    """Summary of a run's replica groups, over all attempts."""

    living: int
    groups: int
    quorum: int | None  # number of the newest quorum; None before the first
    heals: int  # number of times that a group took over another's state
    stall: float  # seconds that training waited for other groups or computed a step again
    restarts: float  # seconds from later attempts' starts to their first quorums, plus those of steps computed again

    @property
    def lost(self) -> float:
        """Seconds lost to failures."""
        return self.stall + self.restarts

    def cells(self) -> dict[str, str]:
        """Cells of the `titan-exp status` table, by column."""
        return {
            "groups": f"{self.living}/{self.groups}",
            "quorum": "-" if self.quorum is None else str(self.quorum),
            "heals": str(self.heals),
            "time lost": format_duration(self.lost),
        }


def summarize_groups(folder: RunFolder) -> GroupSummary | None:
    """Summary of the run's replica groups; None if there are none."""
    events = read_events(folder)
    if not events:
        return None
    quorums = [event for event in events if event["event"] == "quorum"]
    newest = quorums[-1] if quorums else {"groups": [], "quorum": None}
    stalls = [float(stall or 0.0) for stall in read_metrics(folder.metrics).column("stall")]
    starts = {attempt.attempt: attempt.start or attempt.intent for attempt in folder.read_attempts()[1:]}
    first: dict[int, float] = {}
    for event in quorums:
        first.setdefault(event["attempt"], event["time"])
    restarts = sum(max(0.0, first[number] - start) for number, start in starts.items() if number in first)
    return GroupSummary(
        living=len(newest["groups"]),
        groups=len({event["group"] for event in events if event["event"] == "started"}),
        quorum=newest["quorum"],
        heals=sum(len(event["joined"]) for event in quorums if event["step"]),
        stall=sum(stalls),
        restarts=restarts + _repeated_seconds(folder),
    )


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


class GroupEventLines:
    """New events of an attempt as console lines: deaths, starts, heals, and groups that stay away."""

    def __init__(self, folder: RunFolder, attempt: int) -> None:
        self._tail, self._attempt = FileTail(_path(folder), from_now=True), attempt
        self._started: set[int] = set()
        self._living: set[int] | None = None

    def lines(self) -> Iterator[str]:
        """Lines of the events since the last call. A damaged event is skipped."""
        for text in self._tail.lines():
            try:
                event = parse_json(text)
                if event["attempt"] == self._attempt and (line := self._describe(event)) is not None:
                    yield line
            except (ValueError, LookupError, TypeError):
                continue

    def _describe(self, event: dict[str, Any]) -> str | None:
        kind, group = event["event"], f"replica group {event.get('group')}"
        if kind == "quorum":
            return self._describe_quorum(event)
        if kind == "started":
            again = event["group"] in self._started
            self._started.add(event["group"])
            return f"{group} starts again, log {event['start']}" if again else None
        if kind == "ended" and event["exit"] == 0:
            return None
        return {
            "lighthouse started": "the lighthouse of the replica groups died and starts again",
            "ended": f"{group} ended: {event.get('reason')}",
            "not started": f"{group} did not start: {event.get('reason')}",
            "given up": f"{group} stays away for good, and the others train on",
        }.get(kind)

    def _describe_quorum(self, event: dict[str, Any]) -> str | None:
        before, self._living = self._living, set(event["groups"])
        if before is None:
            return None
        what = [f"replica group {group} is gone" for group in sorted(before - self._living)]
        what += [f"replica group {group} has healed" for group in event["joined"]]
        living = f"{len(self._living)} of {len(self._started)} in step {event['step'] + 1}"
        return f"{', '.join(what) or 'new quorum'}: {living}"
