"""Replica group of a rank process, handed from the launcher to its ranks through the environment."""

import json
import os
from dataclasses import asdict, dataclass

REPLICA_GROUP = "TITAN_EXP_REPLICA_GROUP"
"""Environment variable: the group of a rank as JSON; unset without replica groups."""


@dataclass(frozen=True)
class ReplicaGroup:
    """One start of a replica group."""

    number: int
    """From 0 to `cluster.replica_groups` - 1."""
    start: int
    """Starts of all groups in this attempt before this one."""
    lighthouse: str
    """Address of the lighthouse, with its scheme."""
    host: str = "127.0.0.1"
    """Host name or address under which other groups reach this one."""
    loader: int = 0
    """Number of the group that loads the run's checkpoint before the attempt's first step."""
    patience: float = 0.0
    """Seconds that a newcomer waits at least for a group with the run's newest step."""

    @property
    def logs(self) -> str:
        """Name of the log folder below the attempt's."""
        return f"group-{self.number:02d}-start-{self.start:03d}"

    def to_environment(self) -> dict[str, str]:
        """Variables for the ranks. torchft logs several lines in every step otherwise."""
        return {REPLICA_GROUP: json.dumps(asdict(self)), "RUST_LOG": os.environ.get("RUST_LOG", "warn")}

    @staticmethod
    def from_environment() -> "ReplicaGroup | None":
        """Group of this process; None without replica groups."""
        text = os.environ.get(REPLICA_GROUP)
        return None if text is None else ReplicaGroup(**json.loads(text))


def replica_id(group: ReplicaGroup, joined: float) -> str:
    """Name of a group in quorums that it first joined at a Unix time. Names sort by it, so that the oldest living group
    comes first in every quorum, and none is given twice."""
    return f"{int(joined * 1e6):018d}-{group.start}-{group.number}"


def group_number(name: str) -> int:
    """Number of the group with a name of `replica_id`."""
    return int(name.rpartition("-")[2])
