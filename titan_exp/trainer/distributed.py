"""Rendezvous of ranks: device and default process group from environment variables."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.cluster import ClusterConfig

TIMEOUT = timedelta(minutes=20)
"""Timeout of collectives without the hang watchdog."""
JOIN_LIMIT = timedelta(minutes=10)
"""Timeout of the rendezvous: imports from a network disk may take minutes."""


class RanksMissing(RuntimeError):
    """Some ranks of the job did not join."""


@contextmanager
def joined(config: ClusterConfig) -> Iterator[torch.device]:
    """Yield this process's device and join the default process group in the `with` block.

    Raises:
        UserError: CUDA is requested and this machine has none.
    """
    device = _device(config.device, int(os.environ.get("LOCAL_RANK", "0")))
    with joined_process_group(device, timeout=_timeout(config)):
        yield device


@contextmanager
def joined_process_group(device: torch.device, *, timeout: timedelta = TIMEOUT) -> Iterator[None]:
    """Join the default process group in the `with` block, with `timeout` for its collectives.

    Reads `RANK` and `WORLD_SIZE` (default: a single process), and for the rendezvous `TITAN_EXP_RENDEZVOUS`, a file on
    one machine, else `MASTER_ADDR` and `MASTER_PORT`.

    Raises:
        RanksMissing: not all ranks joined within `JOIN_LIMIT`.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    file = os.environ.get("TITAN_EXP_RENDEZVOUS")
    # Gloo beside NCCL: flags and counts go over the CPU and never wait for the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore() if world == 1 else _rendezvous(rank, world, file)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _timeout(config: ClusterConfig) -> timedelta:
    """Timeout above the watchdog's, so that the watchdog ends a hanging run, with the stack of each rank."""
    minutes = config.hang_kill_minutes
    return TIMEOUT if minutes is None else max(TIMEOUT, timedelta(minutes=4 * minutes))


def _rendezvous(rank: int, world: int, file: str | None) -> dist.Store:
    """The store shared by all ranks, once all have joined."""
    url = "env://" if file is None else f"file://{file}"
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, *_ = next(dist.rendezvous(url, rank, world, timeout=JOIN_LIMIT))
    except dist.DistError as error:
        raise RanksMissing(
            f"rank {rank}: no answer from rank 0 at MASTER_ADDR:MASTER_PORT = {address} ({error}). "
            "Did rank 0 start, and does its machine accept connections there?"
        ) from error
    store.set(f"joined/{rank}", "yes")
    keys = [f"joined/{other}" for other in range(world)]
    try:
        store.wait(keys, JOIN_LIMIT)
    except RuntimeError as error:  # the only type that a FileStore raises
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        raise RanksMissing(
            f"rank {rank}: {world - len(missing)} of {world} ranks joined within {JOIN_LIMIT.total_seconds():.0f} s; "
            f"missing: {', '.join(map(str, missing[:16]))}{', ...' if len(missing) > 16 else ''}. See their logs"
        ) from error
    return store


def _device(requested: str, local_rank: int) -> torch.device:
    cuda = torch.cuda.is_available()
    if requested == "cuda" and not cuda:
        raise UserError(
            "cluster.device=cuda: torch finds no CUDA GPU on this machine; cluster.device=cpu trains without one"
        )
    if requested == "cpu" or not cuda:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
