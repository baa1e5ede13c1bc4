"""Election of the lighthouse: the agent of one replica group serves it, and another's takes over when it is silent.

Generations are files in the attempt's log folder. Exclusive creation gives each to one agent, on network disks as well;
an older lighthouse ends when it sees a newer generation. Unlike a job of its own, the next lighthouse does not queue.
"""

import os
import re
import socket
import time
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from titan_exp.config.groups.cluster import ClusterConfig
from titan_exp.launch.rank.lighthouse_server import lighthouse_server
from titan_exp.tracking.run_folder.run_folder import write_atomically

POLL_INTERVAL = 0.5
"""Seconds between polls of the files and of the lighthouse."""
CONNECT_LIMIT = 2.0
"""Timeout of a connection to another node in seconds."""
HANDOVER_SECONDS = 3 * POLL_INTERVAL
"""Seconds for the older lighthouse to end, so that never two form quorums."""
START_SECONDS = 10.0
"""Seconds more for whoever has claimed a generation to publish its address."""
_GENERATION = re.compile(r"lighthouse-(\d{4})")


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
    """One agent's part in the election. `on_start()` is called when this agent's lighthouse serves."""

    def __init__(self, logs: Path, number: int, cluster: ClusterConfig, on_start: Callable[[], None]) -> None:
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
