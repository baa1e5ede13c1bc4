"""Ranks that wait for a peer that never comes end in words."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.cluster.slurm import free_ports
from tests.ranks import Ranks, run_ranks
from titan_exp.trainer import distributed
from titan_exp.trainer.distributed import NetworkBroken, RanksMissing, check_network, joined_process_group


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
    assert said[0] == ("rank 0: 2 of 3 ranks joined within 2 s. These are missing: 2. Read their logs")
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


def connect(missing: int | None) -> str:
    """The network check over gloo, on ranks one of which may never come to it."""
    distributed.NETWORK_LIMIT = timedelta(seconds=3)
    with joined_process_group(torch.device("cpu")):
        try:
            if int(os.environ["RANK"]) == missing:
                return "never came"
            check_network(torch.device("cpu"), "gloo")
        except NetworkBroken as error:
            return str(error)
        finally:
            dist.barrier()  # a rank that left the default group early would break it before the others have joined
        return f"{dist.get_world_size()} connected"


def test_the_network_is_checked() -> None:
    assert run_ranks(2, connect, None) == ["2 connected"] * 2


def test_a_broken_network_ends_in_words() -> None:
    said = run_ranks(2, connect, 1)[0]
    assert said.startswith("rank 0: GLOO cannot connect 2 ranks, this one on cpu of ")
    assert "NCCL_DEBUG=INFO" in said


def test_nccl_is_connected_eagerly_and_bound_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    ones = torch.ones

    class Done:
        def wait(self, timeout: timedelta) -> None:
            calls.append(("wait", timeout))

    def new_group(**given: object) -> str:
        calls.append((given["backend"], given["device_id"]))
        return "group"

    def broken(**_: object) -> str:
        raise dist.DistBackendError("NCCL error in: init.cpp:1\nlast error:\nno route to 10.0.0.7")

    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_reduce", lambda count, **_: (count.fill_(16), Done())[1])
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: calls.append(("destroyed", group)))
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size, device="cpu"))
    device = torch.device("cuda", 3)
    check_network(device, "nccl")
    assert calls == [("nccl", device), ("wait", distributed.NETWORK_LIMIT), ("destroyed", "group")]
    monkeypatch.setattr(dist, "new_group", broken)
    with pytest.raises(NetworkBroken, match=r"rank 3: NCCL cannot connect 16 ranks, this one on cuda:3 .*10\.0\.0\.7"):
        check_network(device, "nccl")


def joined_on_cuda() -> list[object]:
    """Devices that joining ranks of GPUs check, with gloo in NCCL's place."""
    checked: list[object] = []
    original = dist.init_process_group
    dist.init_process_group = lambda _, **given: original("gloo", **given)  # type: ignore[assignment]
    distributed.check_network = lambda *given: checked.append(given)
    with joined_process_group(torch.device("cuda", int(os.environ["RANK"]))):
        dist.barrier()  # none leaves before all have joined
        return checked


def test_ranks_on_gpus_check_it_when_they_join() -> None:
    assert run_ranks(2, joined_on_cuda) == [[(torch.device("cuda", rank), "nccl")] for rank in range(2)]
    assert run_ranks(1, joined_on_cuda) == [[]]


def leave(error: bool) -> int:
    """Times that the default group is destroyed by a rank whose block ends, by an error or not."""
    destroyed: list[object] = []
    original = dist.destroy_process_group
    dist.destroy_process_group = lambda *groups: destroyed.append(groups)  # type: ignore[assignment]
    try:
        with joined_process_group(torch.device("cpu")):
            dist.barrier()  # none leaves before all have joined
            if error:
                raise FloatingPointError
    except FloatingPointError:
        pass
    original()
    return len(destroyed)


@pytest.mark.parametrize(("ranks", "error", "times"), [(2, False, 1), (2, True, 0), (1, False, 1), (1, True, 1)])
def test_a_failed_rank_does_not_wait_for_its_peers(ranks: int, error: bool, times: int) -> None:
    assert run_ranks(ranks, leave, error) == [times] * ranks
