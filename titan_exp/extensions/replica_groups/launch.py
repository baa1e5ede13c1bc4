"""Launch of replica groups. On this machine, each is a set of ranks that restarts alone when it fails, with one
lighthouse for all; on SLURM, each is a job."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.extensions.replica_groups import events
from titan_exp.extensions.replica_groups.config import cluster_of
from titan_exp.extensions.replica_groups.lighthouse import Lighthouse
from titan_exp.launch.attempt_end import AttemptResult
from titan_exp.launch.executor import Processes, Worlds
from titan_exp.launch.local.ranks import LocalRanks
from titan_exp.launch.rank.rank_env import RankInfo
from titan_exp.tracking.run_folder.run_folder import HUNG, RunFolder

MAX_RESTARTS = 3  # number of consecutive starts of a group that end before it trains, after which it stays away
END_LIMIT = 10.0  # seconds that other groups have to end once one has finished; a newcomer has no group to heal from
SLURM = "titan_exp.extensions.replica_groups.launch_slurm"


class GroupLaunch(Worlds):
    """Replica groups as worlds of a run, for the core's launcher, `status` and `compare`."""

    noun = "replica group"
    leave, epilogue = f"{SLURM} leave", f"{SLURM} epilogue"
    status_help = (
        'For replica groups, "groups" shows how many of all are alive,\n'
        '"heals" how often one took over the state of another, and "time lost" the time of waiting for others,\n'
        "computing again and restarting."
    )

    def supervise(self, layout: ResolvedLayout, folder: RunFolder, attempt: int) -> Processes:
        return LocalReplicaGroups(layout, folder, attempt)

    def join(self, folder: RunFolder, rank: RankInfo, number: int) -> tuple[RunFolder, RankInfo]:
        """Join a group, or open the attempt if no group lives."""
        from titan_exp.extensions.replica_groups.launch_slurm import join_group

        return join_group(folder, rank, number)

    def summarize(self, folder: RunFolder) -> events.GroupSummary | None:
        return events.summarize_groups(folder)


@dataclass
class _Slot:
    """One group: its ranks, or the result of its last start."""

    number: int
    ranks: LocalRanks | None = None
    started: float = 0.0
    result: AttemptResult | None = None  # result of the newest start that the launcher did not kill
    ended: float = 0.0
    failed_starts: int = 0  # number of consecutive starts that ended before the group was in a quorum
    given_up: bool = False


class LocalReplicaGroups(Processes):
    """Supervises the groups of one attempt."""

    def __init__(self, layout: ResolvedLayout, folder: RunFolder, attempt: int) -> None:
        self._layout, self.folder, self.attempt = layout, folder, attempt
        self._cluster = cluster_of(layout)
        self._slots = [_Slot(number) for number in range(self._cluster.worlds)]
        self._starts = 0
        self._lighthouse = Lighthouse(self._cluster, folder, folder.attempt_logs(attempt) / "lighthouse.log")
        self._lines = events.GroupEventLines(folder, attempt)
        self._killed = False
        self._over_since: float | None = None
        """Monotonic time at which a group first ended without a failure."""
        self.job_id = ""
        """Job ids of the groups' first starts."""

    def log(self, rank: int) -> Path:
        """Path of a rank's log, in the first group's first start."""
        first = events.ReplicaGroup(0, 0, self._lighthouse.url)
        return self.folder.attempt_logs(self.attempt) / first.logs / f"rank-{rank:05d}.log"

    def start(self) -> None:
        """Start the lighthouse and all groups. Raises OSError if the logs cannot be written."""
        self.folder.make_attempt_logs(self.attempt)
        self._lighthouse.poll()
        for slot in self._slots:
            self._start(slot)
        self.job_id = ",".join(slot.ranks.job_id for slot in self._slots if slot.ranks is not None)

    def poll(self) -> bool:
        """Poll all groups and restart those that failed; returns True once the run is over."""
        if self._lighthouse.poll():
            self._record("lighthouse started")
        for slot in self._slots:
            if slot.ranks is not None and slot.ranks.poll():
                self._end(slot)
        if any(slot.result is not None and slot.result.state != "failed" for slot in self._slots):
            self._over_since = self._over_since or time.monotonic()
            if time.monotonic() - self._over_since > END_LIMIT:
                self.kill()  # these are newcomers
        if self._killed or self._over_since is not None:
            return not any(slot.ranks is not None for slot in self._slots)
        able = [slot for slot in self._slots if not slot.given_up]
        # If groups have trained and none of them is left, newcomers have no state to take over.
        is_dead = (
            any(slot.result is not None for slot in self._slots)
            and any(event["event"] == "quorum" for event in self._events())
            and not any(slot.ranks is not None and self._has_trained(slot) for slot in self._slots)
        )
        if len(able) < self._cluster.min_groups or is_dead:
            self.kill()
            return True
        for slot in able:
            if slot.ranks is None:
                self._start_again(slot)
        return False

    def news(self) -> Iterator[str]:
        return self._lines.lines()

    def kill(self) -> None:
        self._killed = True
        for slot in self._slots:
            if slot.ranks is not None:
                slot.ranks.kill()
                slot.ranks.close()
                slot.ranks = None

    def close(self) -> None:
        self.kill()
        self._lighthouse.close()

    def result(self) -> AttemptResult:
        """Result of the attempt; call after `poll` returned True."""
        found = [(slot.result.state == "failed", slot.ended, slot.result) for slot in self._slots if slot.result]
        # A group ends without a failure only once the last state is saved. Otherwise the first failure is the cause.
        return min(found, key=lambda result: result[:2])[2]

    def _start(self, slot: _Slot) -> None:
        group = events.ReplicaGroup(slot.number, self._starts, self._lighthouse.url)
        self._starts += 1
        slot.started = time.time()
        ranks = LocalRanks(self._layout, self.folder, self.attempt, group)
        ranks.start()
        slot.ranks = ranks
        self._record("started", group=slot.number, start=group.start, job_id=ranks.job_id)

    def _start_again(self, slot: _Slot) -> None:
        try:
            self._start(slot)
        except OSError as error:  # such as a full disk; the other groups train on
            slot.failed_starts += 1
            self._record("not started", group=slot.number, reason=error.strerror or str(error))
            if slot.failed_starts > MAX_RESTARTS:
                slot.given_up = True
                self._record("given up", group=slot.number)

    def _end(self, slot: _Slot) -> None:
        """Record the end of a group's ranks, and decide whether to restart it."""
        assert slot.ranks is not None
        result = slot.ranks.result()
        slot.ranks.close()
        slot.ranks, slot.ended = None, time.time()
        self._record("ended", group=slot.number, exit=result.exit_code, reason=result.reason)
        reason = result.reason if result.state != "failed" else f"replica group {slot.number}, {result.reason}"
        slot.result = replace(result, reason=reason)
        slot.failed_starts = 0 if self._has_trained(slot) else slot.failed_starts + 1
        # A user's error would come again, and a hang usually does.
        final = result.exit_code in (UserError.exit_code, HUNG) or slot.failed_starts > MAX_RESTARTS
        if result.state == "failed" and final:
            self._record("given up", group=slot.number)
        slot.given_up = slot.given_up or final or result.state != "failed"

    def _has_trained(self, slot: _Slot) -> bool:
        """True if the group's newest start was in a quorum."""
        return any(
            event["event"] == "quorum" and event["time"] >= slot.started and slot.number in event["groups"]
            for event in self._events()
        )

    def _events(self) -> list[dict[str, Any]]:
        return events.read_events(self.folder, self.attempt)

    def _record(self, event: str, **fields: object) -> None:
        events.record_event(self.folder, self.attempt, event=event, **fields)
