"""Joining the job: from environment variables to a device and a process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_exp.config.cluster import ClusterConfig
from titan_exp.config.errors import UserError

TIMEOUT = timedelta(minutes=20)
"""How long a collective waits for the other ranks before the run fails."""


@contextmanager
def joined(config: ClusterConfig) -> Iterator[torch.device]:
    """Join the default process group for the time of the block and give this process its device.

    `RANK`, `WORLD_SIZE` and `LOCAL_RANK` are what torchrun and our launchers set; without them this is a job of one
    process. `TITAN_EXP_RENDEZVOUS` names a file to meet at on one machine; otherwise `MASTER_ADDR` and `MASTER_PORT`.

    Raises:
        UserError: CUDA was asked for and this machine has none.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = _device(config.device, int(os.environ.get("LOCAL_RANK", "0")))
    meeting = os.environ.get("TITAN_EXP_RENDEZVOUS")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if world == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    elif meeting:
        dist.init_process_group(
            backend, init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=TIMEOUT
        )
    else:
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _device(asked: str, local_rank: int) -> torch.device:
    cuda = torch.cuda.is_available()
    if asked == "cuda" and not cuda:
        raise UserError(
            "cluster.device=cuda: torch finds no CUDA GPU on this machine; cluster.device=cpu trains without one"
        )
    if asked == "cpu" or not cuda:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
