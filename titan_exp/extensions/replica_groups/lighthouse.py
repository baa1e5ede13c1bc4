"""Lighthouse: the process that forms quorums, and a quorum as groups see it."""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from http.client import HTTPConnection, HTTPException
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from titan_exp.extensions.replica_groups.events import GroupHistory, ReplicaGroup, group_number, replica_id
from titan_exp.parallel.collectives import LOOPBACK, served_store
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.progress_tracker import PROGRESS
from titan_exp.tracking.run_folder.run_folder import RunFolder, write_atomically
from titan_exp.trainer.distributed import TIMEOUT

if TYPE_CHECKING:
    from titan_exp.extensions.replica_groups.config import GroupedCluster


TORCHFT = "0.2.0"
"""Version whose requests the trainer speaks. They change between versions; lighthouse and groups need the same."""
JOIN_SECONDS = 1200.0
"""Seconds that a quorum waits for a group with a heartbeat, which may be saving a checkpoint."""
TICK_SECONDS = 0.05
HOST = "127.0.0.1"
RESTART_SECONDS = 1.0
"""Seconds between two starts of a lighthouse that fails."""
POLL_INTERVAL = 0.5
"""Seconds between polls of the files and of the lighthouse."""
CONNECT_LIMIT = 2.0
"""Timeout of a connection to another node in seconds."""
HANDOVER_SECONDS = 3 * POLL_INTERVAL
"""Seconds for the older lighthouse to end, so that never two form quorums."""
START_SECONDS = 10.0
"""Seconds more for whoever has claimed a generation to publish its address."""
_GENERATION = re.compile(r"lighthouse-(\d{4})")


def torchft_version() -> str | None:
    """Version of the installed torchft; None without one."""
    try:
        return importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def torchft_extension() -> Any:
    """torchft's compiled module: servers and clients. Its package would import torch and telemetry for seconds."""
    package = importlib.util.find_spec("torchft")
    assert package is not None, "checked by the rules"
    spec = PathFinder.find_spec("_torchft", list(package.submodule_search_locations or ()))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lighthouse_server(bind: str, *, min_groups: int, heartbeat: float) -> Any:
    """Start a server at an address; `heartbeat` is the silence in seconds after which a group counts as dead. Raises
    RuntimeError if the address cannot be bound."""
    return torchft_extension().LighthouseServer(
        bind=bind,
        min_replicas=min_groups,
        join_timeout_ms=int(JOIN_SECONDS * 1000),
        quorum_tick_ms=int(TICK_SECONDS * 1000),
        heartbeat_timeout_ms=int(heartbeat * 1000),
    )


class Lighthouse:
    """The lighthouse of a run, started again when it fails, at the same address."""

    def __init__(self, cluster: "GroupedCluster", folder: RunFolder, log: Path) -> None:
        self._address = f"{HOST}:{_free_port()}"
        self._words = [str(folder.path), self._address, str(cluster.min_groups), str(cluster.group_heartbeat_seconds)]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._started = -RESTART_SECONDS

    @property
    def url(self) -> str:
        """Address for the groups."""
        return f"http://{self._address}"

    @property
    def pid(self) -> int | None:
        """Process id; None before the first start."""
        return None if self._process is None else self._process.pid

    def poll(self) -> bool:
        """Start the process if none is running; returns True if it did."""
        if (self._process is not None and self._process.poll() is None) or (
            time.monotonic() - self._started < RESTART_SECONDS
        ):
            return False
        command = [sys.executable, "-m", "titan_exp.extensions.replica_groups.lighthouse", *self._words]
        with self._log.open("ab") as log:
            # In a process group of its own: a signal of the terminal must not end it before the ranks.
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
        self._started = time.monotonic()
        return True

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def newest_generation(logs: Path) -> int:
    """Newest generation in an attempt's log folder; 0 without any."""
    found = (_GENERATION.fullmatch(entry.name) for entry in os.scandir(logs))
    return max((int(match[1]) for match in found if match), default=0)


def lighthouse_address(logs: Path) -> tuple[str, int] | None:
    """Host and port of the newest generation; None until it is published."""
    try:
        host, port = _address_file(logs, newest_generation(logs)).read_text(encoding="utf-8").split()
    except FileNotFoundError:
        return None
    return host, int(port)


class Candidate:
    """One agent's part in the election of the lighthouse: another takes over when it is silent. `on_start()` is called
    when this agent's lighthouse serves.

    Generations are files in the attempt's log folder. Exclusive creation gives each to one agent, on network disks as
    well; an older lighthouse ends when it sees a newer generation. No job of its own must queue for the next one.
    """

    def __init__(self, logs: Path, number: int, cluster: "GroupedCluster", on_start: Callable[[], None]) -> None:
        self._logs, self._cluster, self._on_start = logs, cluster, on_start
        # Candidates stand one after the other.
        self._stagger = number * POLL_INTERVAL
        self._own = self._seen = 0
        self._server: Any = None
        self._silent_since: float | None = None

    def poll(self) -> bool:
        """Stand for election if the lighthouse is silent; returns False once this agent's own is replaced."""
        newest = newest_generation(self._logs)
        if self._own:
            return newest == self._own
        if newest != self._seen:  # whoever claimed it has as long to publish it
            self._seen, self._silent_since = newest, None
        address = lighthouse_address(self._logs)
        if address is not None and _answers(address):
            self._silent_since = None
            return True
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        patience = self._cluster.group_heartbeat_seconds if newest else 0.0
        if newest and address is None:
            patience += START_SECONDS
        if now - self._silent_since >= patience + self._stagger and self._claim(newest + 1):
            self._serve(newest + 1)
        return True

    def _claim(self, generation: int) -> bool:
        try:
            (self._logs / f"lighthouse-{generation:04d}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _serve(self, generation: int) -> None:
        if generation > 1:
            time.sleep(HANDOVER_SECONDS)
        cluster = self._cluster
        self._server = lighthouse_server(
            "0.0.0.0:0", min_groups=cluster.min_groups, heartbeat=cluster.group_heartbeat_seconds
        )
        port = self._server.address().rpartition(":")[2]
        write_atomically(_address_file(self._logs, generation), f"{socket.gethostname()} {port}\n", durable=False)
        self._own = generation
        self._on_start()


def _address_file(logs: Path, generation: int) -> Path:
    return logs / f"lighthouse-{generation:04d}.address"


def _answers(address: tuple[str, int]) -> bool:
    connection = HTTPConnection(*address, timeout=CONNECT_LIMIT)
    try:
        connection.request("GET", "/alive")  # of a stopped process, the kernel still accepts connections
        connection.getresponse()
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return True


def main(arguments: Sequence[str]) -> int:
    """Serve until the launcher has ended and the ranks had time to save."""
    path, address, min_groups, heartbeat = arguments
    folder, parent = RunFolder(path), os.getppid()
    server = lighthouse_server(address, min_groups=int(min_groups), heartbeat=float(heartbeat))
    while os.getppid() == parent or folder.ranks_alive():
        time.sleep(RESTART_SECONDS)
    server.shutdown()
    return 0


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


ASK_TIMEOUT = timedelta(seconds=60)
"""Timeout of one request for a quorum; requests are repeated, since a lighthouse that died is started again."""
CONNECT_TIMEOUT = timedelta(seconds=10)
"""Timeout of connections to the lighthouse and to a group's own manager server."""
LIGHTHOUSE_RETRIES = 600
"""Requests of the manager server to the lighthouse before one of a rank fails."""


@dataclass(frozen=True)
class Quorum:
    """Living groups of a step, the same on every rank of every group except for `rank`, `source` and `behind`."""

    id: int
    members: tuple[str, ...]
    """Names of the groups, the oldest first."""
    rank: int
    """Index of this group among the members."""
    step: int
    """Last step that any member has committed."""
    source: int | None
    """Member from which this group heals; None if it is up to date."""
    behind: tuple[int, ...]
    """Members that heal from this group."""
    seconds: float
    """Seconds waited for it."""
    shares: int
    """Groups among which the step is divided: all members, or as many as in the replayed history."""

    @property
    def size(self) -> int:
        """Number of groups."""
        return len(self.members)


class QuorumClient:
    """This rank's side of the quorum; all ranks of a group construct it together."""

    def __init__(self, group: ReplicaGroup, cluster: "GroupedCluster", mesh: Mesh, *, by_number: bool = False) -> None:
        torchft = torchft_extension()
        get_logger().info(
            "replica group %d of %d; time-outs: heartbeat %g s, collectives between groups %g s, the watchdog %s, "
            "collectives within a group %g s; a quorum is asked for every %g s until the job ends",
            group.number,
            cluster.replica_groups,
            cluster.group_heartbeat_seconds,
            cluster.group_timeout_seconds,
            "off" if cluster.hang_kill_minutes is None else f"{60 * cluster.hang_kill_minutes:g} s",
            TIMEOUT.total_seconds(),
            ASK_TIMEOUT.total_seconds(),
        )
        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        self._timeout = timedelta(seconds=cluster.group_timeout_seconds)
        # A member may have died since the quorum: the others wait for it as if they missed its heartbeat.
        self._connect_timeout = timedelta(seconds=2 * cluster.group_heartbeat_seconds)
        self._configured: tuple[int, tuple[str, ...], int] | None = None
        self._failures = 0
        self._by_number = by_number
        self.order: list[int] = []
        """Rank in `process_group` of every member: by age, or by number, so that sums are the same in every start."""
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
        """Equal ranks of all members, in their order; None after an error."""
        self.first_groups: Any = None
        """Equal ranks of the members that divide the step, if a replayed history has fewer; None in the others."""
        self._history = None if cluster.group_history is None else GroupHistory(cluster.group_history)

    def ask(self, step: int) -> tuple[Quorum, Exception | None]:
        """Wait for a quorum, as a group that has committed `step`. Returns it, and the error if the members could not
        be connected, with which the step must be refused."""
        began = time.monotonic()
        answer = self._request(step)
        members = tuple(answer.replica_ids)
        source = answer.recover_src_replica_rank if answer.heal else None
        quorum = Quorum(
            answer.quorum_id,
            members,
            answer.replica_rank,
            answer.max_step,
            source,
            tuple(answer.recover_dst_replica_ranks),
            time.monotonic() - began,
            len(members) if self._history is None else self._history.groups_of(answer.max_step + 1),
        )
        return quorum, self._connect(quorum, answer.store_address)

    def vote(self, step: int, ready: bool) -> bool:
        """True if all ranks of this group are ready to commit a step; all ranks call it."""
        committed = self._client.should_commit(self._rank, step, ready, timeout=TIMEOUT)
        self._failures = 0 if committed else self._failures + 1
        return committed

    def disconnect(self) -> None:
        """Close the connections to other groups, so that those waiting for this one notice."""
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
                get_logger().warning("no quorum after step %d yet (%s); asking again", step, reason)
                PROGRESS.keep_alive()
                time.sleep(1.0)

    def _connect(self, quorum: Quorum, store: str) -> Exception | None:
        configured = (quorum.id, quorum.members, quorum.shares)
        # Another lighthouse may give the same number to the same members, after a quorum of the others in between.
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
            # Where the leader of the quorum has died nothing listens: TCPStore would try again for several time-outs.
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
