"""Connections between groups after a quorum: made anew where others have, and given up where a member is dead."""

import socket
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from titan_exp.extensions.replica_groups.quorum import Quorum, QuorumClient

KEPT = object()


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(*members: str) -> Any:
    """Client of a group that is connected to the members of quorum 2, without servers."""
    made: Any = object.__new__(QuorumClient)
    made._rank, made._timeout, made._configured = 0, timedelta(seconds=300), (2, members, len(members))
    made._connect_timeout = timedelta(seconds=1)
    made.process_group, made.first_groups, made._by_number = KEPT, None, False
    return made


def seen(*members: str, source: int | None) -> Quorum:
    return Quorum(2, members, 0, 16, source, (), 0.0, len(members))


def test_a_group_that_is_behind_connects_anew(store: dist.TCPStore):
    """After another lighthouse's quorum of the others, which may have led them to the number of before."""
    group = client("a")
    assert group._connect(seen("a", source=None), f"127.0.0.1:{store.port}") is None
    assert group.process_group is KEPT
    assert group._connect(seen("a", source=0), f"127.0.0.1:{store.port}") is None
    assert group.process_group is not KEPT


def test_a_member_that_dies_before_it_connects_is_not_waited_for(store: dist.TCPStore):
    group, began = client("a"), time.monotonic()
    error = group._connect(seen("a", "b", source=None), f"127.0.0.1:{store.port}")
    assert isinstance(error, RuntimeError)
    assert time.monotonic() - began < 60  # not the five minutes of a collective
    assert group.process_group is None


def test_a_leader_that_is_dead_is_not_waited_for():
    """Its store is asked once: torch's client would try for several time-outs of a second."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    group, began = client("a"), time.monotonic()
    assert isinstance(group._connect(seen("a", "b", source=None), address), OSError)
    assert time.monotonic() - began < 1
    assert group.process_group is None
