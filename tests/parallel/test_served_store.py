"""Stores of ranks on one machine cannot be reached over the network."""

import os
from datetime import timedelta

import psutil
import pytest
import torch

from tests.ranks import run_ranks
from titan_exp.launch.rank.host_agent import free_port
from titan_exp.parallel.mesh import served_store
from titan_exp.trainer.distributed import joined_process_group


def listening() -> set[str]:
    found = psutil.Process().net_connections()
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(("host", "added"), [("127.0.0.1", {"127.0.0.1"}), ("localhost", {"::"})])
def test_the_address_decides_who_reaches_a_store(host: str, added: set[str]):
    before = listening()
    store = served_store(host, 0, timedelta(seconds=30))
    assert listening() - before == added - before
    store.set("key", "value")
    assert store.get("key") == b"value"


def _meet(port: int) -> list[str]:
    """Join as under srun on one node, and tell the addresses on which this rank listens."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    before, file = listening(), os.environ.pop("TITAN_EXP_RENDEZVOUS")
    try:
        with joined_process_group(torch.device("cpu")):
            torch.distributed.barrier()
            return sorted(listening() - before)
    finally:
        os.environ["TITAN_EXP_RENDEZVOUS"] = file


def test_ranks_of_one_node_meet_on_the_loopback_interface():
    assert run_ranks(2, _meet, free_port(1)) == [["127.0.0.1"]] * 2
