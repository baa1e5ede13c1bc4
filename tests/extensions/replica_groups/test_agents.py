"""Election of the lighthouse among agents of replica groups, and the forwarder to its address."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.config.composing import experiment
from titan_exp.extensions.replica_groups import lighthouse
from titan_exp.extensions.replica_groups.agents import Forwarder, LifeSign, Server, read_name
from titan_exp.extensions.replica_groups.config import cluster_of
from titan_exp.extensions.replica_groups.lighthouse import (
    TORCHFT,
    Candidate,
    lighthouse_address,
    newest_generation,
    torchft_version,
)

FIRST = """
import sys, time
from pathlib import Path
from tests.extensions.replica_groups.test_agents import CLUSTER, Candidate
candidate = Candidate(Path(sys.argv[1]), 0, CLUSTER, lambda: None)
while candidate.poll():
    time.sleep(0.1)
print("replaced", flush=True)
import os
os._exit(0)
"""
"""Candidate in a process of its own, until it is replaced."""
CLUSTER = cluster_of(experiment("cluster=slurm", "cluster.device=cpu", "cluster.group_heartbeat_seconds=0.5"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lighthouse, "HANDOVER_SECONDS", 0.1)
    monkeypatch.setattr(lighthouse, "POLL_INTERVAL", 0.1)


@pytest.mark.skipif(torchft_version() != TORCHFT, reason=f"needs torchft {TORCHFT}")
def test_another_candidate_takes_over_a_silent_lighthouse(tmp_path: Path):
    serves: list[int] = []
    second = Candidate(tmp_path, 1, CLUSTER, lambda: serves.append(1))
    first = subprocess.Popen([sys.executable, "-c", FIRST, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: lighthouse_address(tmp_path) is not None)
        before = lighthouse_address(tmp_path)
        for _ in range(3):
            assert second.poll()
        assert serves == []
        first.send_signal(signal.SIGSTOP)  # as a node that is away for a while
        until(lambda: second.poll() and serves == [1])
        assert newest_generation(tmp_path) == 2
        assert lighthouse_address(tmp_path) != before
        first.send_signal(signal.SIGCONT)
        out, _ = first.communicate(timeout=20)
        assert out == "replaced\n"
        assert second.poll()
    finally:
        first.kill()


def test_of_two_candidates_one_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second finds the generation claimed, and gives the first as long to publish it."""
    serves: list[int] = []
    candidate = Candidate(tmp_path, 0, CLUSTER, lambda: serves.append(0))
    (tmp_path / "lighthouse-0001").touch()
    monkeypatch.setattr(lighthouse, "newest_generation", lambda _: 0)
    assert candidate.poll()
    assert serves == []
    monkeypatch.undo()
    assert lighthouse_address(tmp_path) is None
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
