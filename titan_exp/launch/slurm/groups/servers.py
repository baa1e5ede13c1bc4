"""TCP servers of a replica group's agent: forwarder to the lighthouse, and the answer that the group lives."""

import contextlib
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from titan_exp.launch.slurm.groups.election import CONNECT_LIMIT

ADDRESS_LIMIT = 10.0
"""Seconds that a connection waits for a lighthouse."""
CHUNK = 65536


class Server(ABC):
    """Accepts connections on a host's port, 0 for a free one, each in a thread of its own."""

    def __init__(self, host: str, port: int) -> None:
        self._listener = socket.create_server((host, port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @abstractmethod
    def handle(self, connection: socket.socket) -> None:
        """Serve one connection, which is closed afterwards."""

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._handle, args=(connection,), daemon=True).start()

    def _handle(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            self.handle(connection)


class Forwarder(Server):
    """Forwards local connections to the lighthouse's present address, which `address` returns.

    The servers of torchft keep the address with which they are created, and connect again when a connection breaks.
    """

    def __init__(self, port: int, address: Callable[[], tuple[str, int] | None]) -> None:
        self._address = address
        self._open: dict[socket.socket, tuple[str, int]] = {}
        super().__init__("127.0.0.1", port)

    def drop_others(self, address: tuple[str, int] | None) -> None:
        """Break connections to former addresses: a lost node does not close them."""
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
    """Tells every client the name of this start of the group."""

    def __init__(self, port: int, name: str) -> None:
        self._name = name
        super().__init__("0.0.0.0", port)

    def handle(self, connection: socket.socket) -> None:
        """Send the name."""
        connection.sendall(self._name.encode())


def read_name(host: str, port: int) -> str | None:
    """Name that a `LifeSign` tells; None if no one answers."""
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
