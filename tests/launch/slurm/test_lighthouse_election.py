"""Election of the lighthouse among agents of replica groups, and the forwarder to its address."""

import socket
import time
from pathlib import Path

import pytest

from tests.config.composing import experiment
from titan_exp.config.machine.torchft import TORCHFT, torchft_version
from titan_exp.launch.slurm.groups import election
from titan_exp.launch.slurm.groups.election import Candidate, lighthouse_address, newest_generation
from titan_exp.launch.slurm.groups.servers import Forwarder, LifeSign, Server, read_name

CLUSTER = experiment("cluster=slurm", "cluster.device=cpu", "cluster.group_heartbeat_seconds=0.5").cluster


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(election, "HANDOVER_SECONDS", 0.1)
    monkeypatch.setattr(election, "POLL_INTERVAL", 0.1)


@pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}")
def test_another_candidate_takes_over_a_silent_lighthouse(tmp_path: Path):
    serves: list[int] = []
    first, second = (
        Candidate(tmp_path, number, CLUSTER, lambda number=number: serves.append(number)) for number in (0, 1)
    )
    assert first.poll()
    assert second.poll()
    assert serves == [0]
    before = lighthouse_address(tmp_path)
    first._server.shutdown()
    until(lambda: second.poll() and serves == [0, 1])
    assert newest_generation(tmp_path) == 2
    assert lighthouse_address(tmp_path) != before
    assert not first.poll()  # it is replaced and ends, even if it is still alive
    assert second.poll()


def test_of_two_candidates_one_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second finds the generation claimed, and gives the first as long to publish it."""
    candidate = Candidate(tmp_path, 0, CLUSTER, lambda: None)
    (tmp_path / "lighthouse-0001").touch()
    monkeypatch.setattr(election, "newest_generation", lambda _: 0)
    assert candidate.poll()
    assert lighthouse_address(tmp_path) is None
    monkeypatch.undo()
    assert candidate.poll()
    assert newest_generation(tmp_path) == 1


class Echo(Server):
    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        super().__init__("127.0.0.1", 0)

    def handle(self, connection: socket.socket) -> None:
        while data := connection.recv(100):
            connection.sendall(self.mark + data)


def test_forwarder_follows_the_lighthouse():
    old, new = Echo(b"old "), Echo(b"new ")
    address = ("127.0.0.1", old.port)
    forwarder = Forwarder(0, lambda: address)
    with socket.create_connection(("127.0.0.1", forwarder.port), 5) as connection:
        connection.sendall(b"hello")
        assert connection.recv(100) == b"old hello"
        address = ("127.0.0.1", new.port)
        forwarder.drop_others(address)
        assert connection.recv(100) == b""  # broken, so that the client connects again
    with socket.create_connection(("127.0.0.1", forwarder.port), 5) as connection:
        connection.sendall(b"hello")
        assert connection.recv(100) == b"new hello"


def test_life_sign():
    sign = LifeSign(0, "group-01-start-003")
    assert read_name("127.0.0.1", sign.port) == "group-01-start-003"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert read_name("127.0.0.1", port) is None


def until(done):
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)
