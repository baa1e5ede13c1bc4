"""Ranks that wait for a peer that never comes end in words."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.cluster.slurm import free_ports
from tests.ranks import Ranks, run_ranks
from titan_exp.trainer import distributed
from titan_exp.trainer.distributed import RanksMissing, joined_process_group


def meet(missing: int | None, address: str | None, port: int | None) -> str | int:
    distributed.JOIN_LIMIT = timedelta(seconds=2)
    if int(os.environ["RANK"]) == missing:
        return "never came"
    if address is not None:
        del os.environ["TITAN_EXP_RENDEZVOUS"]
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port))
    try:
        with joined_process_group(torch.device("cpu")):
            number = torch.ones(1)
            dist.all_reduce(number)
            return int(number)
    except RanksMissing as error:
        return str(error)


def test_a_missing_rank_is_named() -> None:
    said = run_ranks(3, meet, 2, None, None)
    assert said[0] == ("rank 0: 2 of 3 ranks joined within 2 s; missing: 2. See their logs")
    assert str(said[1]).startswith("rank 1: 2 of 3 ranks joined")


def test_rank_0_missing_at_an_address() -> None:
    (port,) = free_ports(1)
    said = run_ranks(2, meet, 0, "127.0.0.1", port)
    assert str(said[1]).startswith(f"rank 1: no answer from rank 0 at MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}")


@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_all_meet(address: str | None) -> None:
    (port,) = free_ports(1)
    ranks = Ranks(2, meet, None, address, port)
    try:
        assert ranks.results(60.0) == [2, 2]
    finally:
        ranks.kill()
