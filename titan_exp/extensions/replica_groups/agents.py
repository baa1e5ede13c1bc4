"""Agent of a replica group in a SLURM job: a child of the group's rank 0 that ends together with it. `python -m
titan_exp.extensions.replica_groups.agents RUN_FOLDER ATTEMPT LOGS NUMBER PORT PORT` forwards to the lighthouse, serves
it if no other group does, and tells other groups that this one lives. It prints its ports; a port of 0 asks for a free
one."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.extensions.replica_groups.config import cluster_of
from titan_exp.extensions.replica_groups.events import record_event
from titan_exp.extensions.replica_groups.lighthouse import (
    CONNECT_LIMIT,
    POLL_INTERVAL,
    RESTART_SECONDS,
    Candidate,
    lighthouse_address,
)
from titan_exp.tracking.run_folder.run_folder import STOPPED, RunFolder

END_LIMIT = 10.0
"""Seconds that a group has to end after the attempt has ended; a newcomer would have no group to heal from."""
ADDRESS_LIMIT = 10.0  # seconds that a connection waits for a lighthouse
CHUNK = 65536


@dataclass(frozen=True)
class Ports:
    """Ports of an agent."""

    lighthouse: int = 0  # port that forwards to the lighthouse, on the loopback interface
    life_sign: int = 0


def start_agent(folder: RunFolder, attempt: int, logs: str, number: int) -> Ports:
    """Start the agent for a start of group `number`, and restart it at the same ports whenever it fails. Once the
    attempt is over, this process ends. Raises UserError if the agent does not start."""

    def start(ports: Ports) -> tuple[subprocess.Popen[str], Ports]:
        words = [str(folder.path), str(attempt), logs, str(number), str(ports.lighthouse), str(ports.life_sign)]
        command = [sys.executable, "-m", "titan_exp.extensions.replica_groups.agents", *words]
        # Otherwise a lighthouse logs several lines in every step.
        variables = {**os.environ, "RUST_LOG": os.environ.get("RUST_LOG", "warn")}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=variables)
        assert process.stdout is not None
        line = process.stdout.readline().split()
        return process, Ports(*map(int, line)) if len(line) == 2 else ports

    process, ports = start(Ports())
    if not ports.lighthouse:
        raise UserError(f"replica group {number}: its agent did not start. See the log of its rank 0.")

    def supervise(process: subprocess.Popen[str]) -> None:
        while process.wait() != STOPPED:
            time.sleep(RESTART_SECONDS)
            process, _ = start(ports)
        os._exit(STOPPED)

    threading.Thread(target=supervise, args=(process,), name="titan_exp agent", daemon=True).start()
    return ports


def main(arguments: Sequence[str]) -> int:
    """Serve until rank 0 has ended; returns 85 once the attempt is over."""
    path, logs = arguments[0], arguments[2]
    attempt, number, *ports = (int(word) for word in (arguments[1], *arguments[3:]))
    folder, parent = RunFolder(path), os.getppid()
    cluster, shared = cluster_of(load_experiment(folder.config, trust=True)), folder.attempt_logs(attempt)
    forwarder, life_sign = Forwarder(ports[0], lambda: lighthouse_address(shared)), LifeSign(ports[1], logs)
    print(forwarder.port, life_sign.port, flush=True)
    started = partial(record_event, folder, attempt, event="lighthouse started", group=number)
    candidate = Candidate(shared, number, cluster, started)
    over_since: float | None = None
    while os.getppid() == parent:
        try:
            if not candidate.poll():
                return 1  # its lighthouse ends with it; rank 0 starts it again
            forwarder.drop_others(lighthouse_address(shared))
            newest = folder.read_attempts()[-1]
            is_over = newest.attempt != attempt or newest.end is not None
            over_since = (over_since or time.monotonic()) if is_over else None
        except (OSError, UserError) as error:  # a network disk may be away for a while
            print(f"agent of replica group {number}: {error}", file=sys.stderr, flush=True)
        if over_since is not None and time.monotonic() - over_since > END_LIMIT:
            return STOPPED
        time.sleep(POLL_INTERVAL)
    return 0


class Server(ABC):
    """Accepts connections on a host's port (0 for a free one), each in its own thread."""

    def __init__(self, host: str, port: int) -> None:
        self._listener = socket.create_server((host, port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @abstractmethod
    def handle(self, connection: socket.socket) -> None:
        """Serve one connection; it is closed afterwards."""

    def _accept(self) -> None:
        def serve(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                self.handle(connection)

        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


class Forwarder(Server):
    """Forwards local connections to the lighthouse's present address, which `address` returns. torchft's servers keep
    the address with which they were created, and reconnect when a connection breaks."""

    def __init__(self, port: int, address: Callable[[], tuple[str, int] | None]) -> None:
        self._address = address
        self._open: dict[socket.socket, tuple[str, int]] = {}
        super().__init__("127.0.0.1", port)

    def drop_others(self, address: tuple[str, int] | None) -> None:
        """Break connections to former addresses, because a lost node does not close them."""
        for connection, target in list(self._open.items()):
            if target != address:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle(self, connection: socket.socket) -> None:
        """Copy bytes in both directions until one side closes."""
        deadline = time.monotonic() + ADDRESS_LIMIT
        while (target := self._address()) is None:
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)
        with socket.create_connection(target, CONNECT_LIMIT) as upstream:
            upstream.settimeout(None)
            self._open[connection] = target
            try:
                back = threading.Thread(target=_copy, args=(upstream, connection), daemon=True)
                back.start()
                _copy(connection, upstream)
                back.join()
            finally:
                del self._open[connection]


class LifeSign(Server):
    """Tells every client the name of this group's present start."""

    def __init__(self, port: int, name: str) -> None:
        self._name = name
        super().__init__("0.0.0.0", port)

    def handle(self, connection: socket.socket) -> None:
        connection.sendall(self._name.encode())


def read_name(host: str, port: int) -> str | None:
    """Name that a `LifeSign` tells; None if nobody answers."""
    try:
        with socket.create_connection((host, port), CONNECT_LIMIT) as connection:
            return b"".join(iter(lambda: connection.recv(CHUNK), b"")).decode(errors="replace")
    except OSError:
        return None


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    # This skips the destructors of the server's threads.
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
