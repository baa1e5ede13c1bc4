"""Shared-memory capacity check for staging. Containers have 64 MB by default."""

import shutil
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from titan_exp.ops.local_tensor import local_tensor

SHARED_MEMORY = Path("/dev/shm")


def shared_memory_shortage(state: Mapping[str, Tensor], group: dist.ProcessGroup) -> str | None:
    """Describe the first host whose shared memory cannot hold the states of all its ranks; None if all can.

    Collective over the group, with the same result on all ranks.
    """
    local = (socket.gethostname(), _storage_bytes(state.values()), _free_bytes())
    ranks: list[tuple[str, int, int | None]] = [local] * dist.get_world_size(group)
    dist.all_gather_object(ranks, local, group=group)
    needed: dict[str, int] = {}
    for host, size, _ in ranks:
        needed[host] = needed.get(host, 0) + size
    for host, _, free in ranks:
        if free is not None and free < needed[host]:
            return (
                f"{SHARED_MEMORY} of {host} has {free / 1e9:.3f} GB free, and a copy of the state takes "
                f"{needed[host] / 1e9:.3f} GB"
            )
    return None


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of distinct storages, rounded up to pages; torch stages whole storages."""
    local = [local_tensor(tensor) for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    return sum({storage.data_ptr(): -(-storage.nbytes() // 4096) * 4096 for storage in storages}.values())


def _free_bytes() -> int | None:
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return None
