"""Joining the job: from environment variables to a device and a process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.cluster import ClusterConfig

TIMEOUT = timedelta(minutes=20)
"""How long a collective waits for the other ranks before the run fails, without the hang watchdog."""
JOIN_LIMIT = timedelta(minutes=10)
"""How long ranks wait for each other at the start: imports from a network disk may take minutes."""


class RanksMissing(RuntimeError):
    """Some ranks of the job did not come."""


@contextmanager
def joined(config: ClusterConfig) -> Iterator[torch.device]:
    """Give this process its device and join the default process group for the time of the block.

    Raises:
        UserError: CUDA was asked for and this machine has none.
    """
    device = _device(config.device, int(os.environ.get("LOCAL_RANK", "0")))
    with joined_process_group(device, timeout=_timeout(config)):
        yield device


@contextmanager
def joined_process_group(device: torch.device, *, timeout: timedelta = TIMEOUT) -> Iterator[None]:
    """Join the default process group for the time of the block; its collectives wait for `timeout`.

    `RANK`, `WORLD_SIZE` and `LOCAL_RANK` are what torchrun and our launchers set; without them this is a job of one
    process. `TITAN_EXP_RENDEZVOUS` names a file to meet at on one machine; otherwise `MASTER_ADDR` and `MASTER_PORT`.

    Raises:
        RanksMissing: not all ranks came within `JOIN_LIMIT`.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    meeting = os.environ.get("TITAN_EXP_RENDEZVOUS")
    # Gloo beside NCCL: small decisions go over the CPU and never wait for the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore() if world == 1 else _meet(rank, world, meeting)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _timeout(config: ClusterConfig) -> timedelta:
    """Longer than any rank may hang, so that it is the watch that ends the run, which says where each rank stood."""
    minutes = config.hang_kill_minutes
    return TIMEOUT if minutes is None else max(TIMEOUT, timedelta(minutes=4 * minutes))


def _meet(rank: int, world: int, meeting: str | None) -> dist.Store:
    """The store that all ranks share, when all have come."""
    where = "env://" if meeting is None else f"file://{meeting}"
    name, address = f"rank {rank}", f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, *_ = next(dist.rendezvous(where, rank, world, timeout=JOIN_LIMIT))
    except dist.DistError as error:
        raise RanksMissing(
            f"{name}: no answer at MASTER_ADDR:MASTER_PORT = {address}, where rank 0 should be ({error}). "
            "Did rank 0 start, and does its machine accept connections there?"
        ) from error
    store.set(f"here/{rank}", "yes")
    keys = [f"here/{other}" for other in range(world)]
    try:
        store.wait(keys, JOIN_LIMIT)
    except RuntimeError as error:  # all that a store in a file raises
        away = [other for other, key in enumerate(keys) if not store.check([key])]
        raise RanksMissing(
            f"{name}: {world - len(away)} of {world} ranks came within {JOIN_LIMIT.total_seconds():.0f} s; missing: "
            f"{', '.join(map(str, away[:16]))}{', ...' if len(away) > 16 else ''}. Their logs say how far they got"
        ) from error
    return store


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
