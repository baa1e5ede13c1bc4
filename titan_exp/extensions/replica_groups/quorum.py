"""Quorum of replica groups: torchft's lighthouse, a manager server per group, a process group between equal ranks. We
do not use torchft's `Manager`: it swallows errors of collectives, compares quorums by a number that a restarted
lighthouse reuses, heals by unpickling an HTTP server's data, and takes seconds to import."""

import socket
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from titan_exp.extensions.replica_groups.events import GroupHistory, ReplicaGroup, group_number, replica_id
from titan_exp.extensions.replica_groups.lighthouse import torchft_extension
from titan_exp.parallel.mesh import LOOPBACK, Mesh, served_store
from titan_exp.tracking.logging import PROGRESS, get_logger
from titan_exp.trainer.distributed import TIMEOUT

if TYPE_CHECKING:
    from titan_exp.extensions.replica_groups.config import GroupedCluster

ASK_TIMEOUT = timedelta(seconds=60)
"""Timeout of one request for a quorum. Requests are repeated, because a dead lighthouse is restarted."""
CONNECT_TIMEOUT = timedelta(seconds=10)  # timeout of connections to the lighthouse and to a group's own manager server
LIGHTHOUSE_RETRIES = 600  # number of requests from the manager server to the lighthouse before a rank's request fails


@dataclass(frozen=True)
class Quorum:
    """Living groups of a step, the same on every rank of every group except `rank`, `source` and `behind`."""

    id: int
    members: tuple[str, ...]  # names of the groups, oldest first
    rank: int
    step: int  # last step that any member has committed
    source: int | None  # member from which this group heals; None if it is up to date
    behind: tuple[int, ...]  # members that heal from this group
    seconds: float  # seconds spent waiting for the quorum
    shares: int  # number of groups that divide the step: all members, or as many as in the replayed history

    @property
    def size(self) -> int:
        """Number of groups."""
        return len(self.members)


class QuorumClient:
    """This rank's side of the quorum; all ranks of a group construct it together."""

    def __init__(self, group: ReplicaGroup, cluster: "GroupedCluster", mesh: Mesh, *, by_number: bool = False) -> None:
        torchft = torchft_extension()
        watchdog = "off" if cluster.hang_kill_minutes is None else f"{60 * cluster.hang_kill_minutes:g} s"
        get_logger().info(
            f"replica group {group.number} of {cluster.replica_groups}. Time-outs: heartbeat "
            f"{cluster.group_heartbeat_seconds:g} s, collectives between groups {cluster.group_timeout_seconds:g} s, "
            f"the watchdog {watchdog}, collectives within a group {TIMEOUT.total_seconds():g} s. It asks for a quorum "
            f"every {ASK_TIMEOUT.total_seconds():g} s until the job ends"
        )
        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        self._timeout = timedelta(seconds=cluster.group_timeout_seconds)
        # A member may have died since the quorum. The others wait for it as if they had missed its heartbeat.
        self._connect_timeout = timedelta(seconds=2 * cluster.group_heartbeat_seconds)
        self._configured: tuple[int, tuple[str, ...], int] | None = None
        self._failures = 0
        self._by_number = by_number
        self.order: list[int] = []
        """Rank of every member in `process_group`: by age, or by number, so that sums are the same in every start."""
        address: list[Any] = [None]
        if self._rank == 0:
            host, bind = group.host, LOOPBACK if group.host == LOOPBACK else "0.0.0.0"
            self._store = served_store(host, 0, TIMEOUT)
            self._server = torchft.ManagerServer(
                replica_id=replica_id(group, time.time()),
                lighthouse_addr=group.lighthouse,
                hostname=host,
                bind=f"{bind}:0",
                store_addr=f"{host}:{self._store.port}",
                world_size=ranks,
                heartbeat_interval=timedelta(seconds=cluster.group_heartbeat_seconds / 10),
                connect_timeout=CONNECT_TIMEOUT,
                quorum_retries=LIGHTHOUSE_RETRIES,
            )
            address = [self._server.address()]
        dist.broadcast_object_list(address, src=0, group=mesh.cpu_group)
        self._client = torchft.ManagerClient(address[0], connect_timeout=CONNECT_TIMEOUT)
        self.process_group: Any = None
        """Process group of equal ranks of all members, in their order; None after an error."""
        self.first_groups: Any = None
        """Process group of the members that divide the step, if a replayed history has fewer; None elsewhere."""
        self._history = None if cluster.group_history is None else GroupHistory(cluster.group_history)

    def ask(self, step: int) -> tuple[Quorum, Exception | None]:
        """Wait for a quorum after `step`; also returns the error of connecting, for which the step must be refused."""
        began = time.monotonic()
        answer = self._request(step)
        members = tuple(answer.replica_ids)
        source = answer.recover_src_replica_rank if answer.heal else None
        behind, step = tuple(answer.recover_dst_replica_ranks), answer.max_step
        shares = len(members) if self._history is None else self._history.groups_of(step + 1)
        waited = time.monotonic() - began
        quorum = Quorum(answer.quorum_id, members, answer.replica_rank, step, source, behind, waited, shares)
        return quorum, self._connect(quorum, answer.store_address)

    def vote(self, step: int, ready: bool) -> bool:
        """True if all ranks of this group are ready to commit a step; all ranks call it."""
        committed = self._client.should_commit(self._rank, step, ready, timeout=TIMEOUT)
        self._failures = 0 if committed else self._failures + 1
        return committed

    def disconnect(self) -> None:
        """Close the connections to other groups, so that groups that wait for this one notice."""
        self._configured = self.process_group = self.first_groups = None

    def _request(self, step: int) -> Any:
        while True:
            try:
                return self._client._quorum(
                    group_rank=self._rank,
                    step=step,
                    checkpoint_metadata="",
                    shrink_only=False,
                    timeout=ASK_TIMEOUT,
                    commit_failures=self._failures,
                    # Initial weights are a function of the seed.
                    init_sync=False,
                )
            except (TimeoutError, RuntimeError) as error:
                reason = str(error).partition("\n")[0]
                get_logger().warning("no quorum after step %d yet (%s), so ask again", step, reason)
                PROGRESS.keep_alive()
                time.sleep(1.0)

    def _connect(self, quorum: Quorum, store: str) -> Exception | None:
        configured = (quorum.id, quorum.members, quorum.shares)
        # Another lighthouse may give the same number to the same members, with a quorum of other members in between.
        if self._configured == configured and quorum.source is None:
            return None
        # A restarted lighthouse counts from 1 again, and keys of an earlier quorum are still in the store.
        prefix = f"{quorum.id}-{quorum.step}-{uuid.uuid5(uuid.NAMESPACE_OID, ' '.join(quorum.members))}-{self._rank}"
        self.disconnect()
        self.order = list(range(quorum.size))
        if self._by_number:
            # Two starts of one group may be members, if the first has died since it asked.
            by_number = sorted(self.order, key=lambda rank: (group_number(quorum.members[rank]), rank))
            self.order = [by_number.index(rank) for rank in self.order]
        host, _, port = store.rpartition(":")
        try:
            # If the quorum's leader has died, nothing listens, and TCPStore would retry for several timeouts.
            socket.create_connection((host, int(port)), self._connect_timeout.total_seconds()).close()
            shared = dist.TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=self._connect_timeout
            )
            self.process_group = self._gloo(shared, prefix, self.order[quorum.rank], quorum.size)
            if quorum.rank < quorum.shares < quorum.size:
                self.first_groups = self._gloo(shared, f"{prefix}-first", quorum.rank, quorum.shares)
        except (OSError, RuntimeError) as error:
            self.disconnect()
            return error.with_traceback(None)
        self._configured = configured
        return None

    def _gloo(self, store: Any, prefix: str, rank: int, size: int) -> Any:
        group = dist.distributed_c10d.ProcessGroupGloo(
            dist.PrefixStore(prefix, store), rank, size, self._connect_timeout
        )
        group._set_default_timeout(self._timeout)
        return group
