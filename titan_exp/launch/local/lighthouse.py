"""Lighthouse process: torchft's server that knows the living replica groups.

`python -m titan_exp.launch.local.lighthouse RUN_FOLDER ADDRESS MIN_GROUPS HEARTBEAT_SECONDS` serves until the launcher
ends it. If the launcher is killed, it stays while the ranks save.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from titan_exp.config.groups.cluster import ClusterConfig
from titan_exp.launch.rank.lighthouse_server import lighthouse_server
from titan_exp.tracking.run_folder.run_folder import RunFolder

HOST = "127.0.0.1"
RESTART_SECONDS = 1.0
"""Seconds between two starts of a lighthouse that fails."""


class Lighthouse:
    """The lighthouse of a run, started again when it fails, at the same address."""

    def __init__(self, cluster: ClusterConfig, folder: RunFolder, log: Path) -> None:
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
        command = [sys.executable, "-m", "titan_exp.launch.local.lighthouse", *self._words]
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
