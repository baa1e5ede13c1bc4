"""Lighthouse: torchft's server that knows the living replica groups. It is a child of the launcher or of an elected
agent. `python -m titan_exp.extensions.replica_groups.lighthouse RUN_FOLDER ADDRESS MIN_GROUPS HEARTBEAT_SECONDS` serves
until the launcher on this machine ends it. If the launcher is killed, it stays while the ranks save."""

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from http.client import HTTPConnection, HTTPException
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_exp.tracking.run_folder.run_folder import RunFolder, write_atomically

if TYPE_CHECKING:
    from titan_exp.extensions.replica_groups.config import GroupedCluster

TORCHFT = "0.2.0"  # torchft version whose requests the trainer speaks; they change between versions
JOIN_SECONDS = 1200.0
"""Seconds that a quorum waits for a group that has a heartbeat, because it may be saving a checkpoint."""
TICK_SECONDS = 0.05
HOST = "127.0.0.1"
RESTART_SECONDS = 1.0  # seconds between two starts of a lighthouse that keeps failing
POLL_INTERVAL = 0.5  # seconds between polls of the files and of the lighthouse
CONNECT_LIMIT = 2.0  # timeout of a connection to another node in seconds
HANDOVER_SECONDS = 3 * POLL_INTERVAL
"""Seconds that the older lighthouse has to end, so that two never form quorums at once."""
START_SECONDS = 10.0  # further seconds for an agent that has claimed a generation to publish its address
_GENERATION = re.compile(r"lighthouse-(\d{4})")


def torchft_version() -> str | None:
    """Version of the installed torchft; None without one."""
    try:
        return importlib.metadata.version("torchft")
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def torchft_extension() -> Any:
    """torchft's compiled module of servers and clients. Its package would import torch and telemetry for seconds."""
    package = importlib.util.find_spec("torchft")
    assert package is not None, "checked by the rules"
    spec = PathFinder.find_spec("_torchft", list(package.submodule_search_locations or ()))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lighthouse_server(bind: str, *, min_groups: int, heartbeat: float) -> Any:
    """Start a server at an address; after `heartbeat` seconds of silence a group counts as dead."""
    return torchft_extension().LighthouseServer(
        bind=bind,
        min_replicas=min_groups,
        join_timeout_ms=int(JOIN_SECONDS * 1000),
        quorum_tick_ms=int(TICK_SECONDS * 1000),
        heartbeat_timeout_ms=int(heartbeat * 1000),
    )


class Lighthouse:
    """Lighthouse of a run; if it fails, it is restarted at the same address."""

    def __init__(self, cluster: "GroupedCluster", folder: RunFolder, log: Path) -> None:
        with contextlib.closing(socket.socket()) as probe:  # a free port
            probe.bind((HOST, 0))
            self._address = f"{HOST}:{probe.getsockname()[1]}"
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
        is_running = self._process is not None and self._process.poll() is None
        if is_running or time.monotonic() - self._started < RESTART_SECONDS:
            return False
        command = [sys.executable, "-m", "titan_exp.extensions.replica_groups.lighthouse", *self._words]
        with self._log.open("ab") as log:
            # It has its own process group, because a signal from the terminal must not end it before the ranks.
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
    """One agent's part in the election of the lighthouse; when the lighthouse is silent, another agent takes over.
    `on_start()` is called once this agent's lighthouse serves. Generations are files in the attempt's log folder.
    Exclusive creation gives each to one agent, even on network disks, and a lighthouse ends when it sees a newer
    generation. So no separate job must queue for the next lighthouse."""

    def __init__(self, logs: Path, number: int, cluster: "GroupedCluster", on_start: Callable[[], None]) -> None:
        self._logs, self._cluster, self._on_start = logs, cluster, on_start
        # Candidates stand for election one after the other.
        self._stagger = number * POLL_INTERVAL
        self._own = self._seen = 0
        self._server: Any = None
        self._silent_since: float | None = None

    def poll(self) -> bool:
        """Stand for election if the lighthouse is silent; returns False once this agent's own is replaced."""
        newest = newest_generation(self._logs)
        if self._own:
            return newest == self._own
        if newest != self._seen:  # the agent that claimed it has this long to publish it
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
        if now - self._silent_since >= patience + self._stagger:
            try:
                (self._logs / f"lighthouse-{newest + 1:04d}").touch(exist_ok=False)
            except FileExistsError:  # claimed by another agent
                return True
            self._serve(newest + 1)
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
    """Serve until the launcher has ended and the ranks have had time to save."""
    path, address, min_groups, heartbeat = arguments
    folder, parent = RunFolder(path), os.getppid()
    server = lighthouse_server(address, min_groups=int(min_groups), heartbeat=float(heartbeat))
    while os.getppid() == parent or folder.ranks_alive():
        time.sleep(RESTART_SECONDS)
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
