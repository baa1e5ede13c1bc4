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
    """Give this process its device and join the default process group for the time of the block.

    Raises:
        UserError: CUDA was asked for and this machine has none.
    """
    device = _device(config.device, int(os.environ.get("LOCAL_RANK", "0")))
    with joined_process_group(device):
        yield device


@contextmanager
def joined_process_group(device: torch.device) -> Iterator[None]:
    """Join the default process group for the time of the block.

    `RANK`, `WORLD_SIZE` and `LOCAL_RANK` are what torchrun and our launchers set; without them this is a job of one
    process. `TITAN_EXP_RENDEZVOUS` names a file to meet at on one machine; otherwise `MASTER_ADDR` and `MASTER_PORT`.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    meeting = os.environ.get("TITAN_EXP_RENDEZVOUS")
    # Gloo beside NCCL: small decisions go over the CPU and never wait for the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    shared = {"rank": rank, "world_size": world, "timeout": TIMEOUT}
    if world == 1:
        dist.init_process_group(backend, store=dist.HashStore(), **shared)
    elif meeting:
        dist.init_process_group(backend, init_method=f"file://{meeting}", **shared)
    else:
        dist.init_process_group(backend, **shared)
    try:
        yield
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
