"""Whether a state fits into shared memory. Containers have 64 MB of it unless asked for more."""

import shutil
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

SHARED_MEMORY = Path("/dev/shm")
"""Where Linux keeps it."""


def shared_memory_shortage(state: Mapping[str, Tensor], group: dist.ProcessGroup) -> str | None:
    """What is missing for the states of all ranks of a machine, on the first machine where anything is; else None.

    The same answer on all ranks of the group, which call it together.
    """
    mine = (socket.gethostname(), _bytes(state.values()), _free())
    ranks: list[tuple[str, int, int | None]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(ranks, mine, group=group)
    needed: dict[str, int] = {}
    for host, size, _ in ranks:
        needed[host] = needed.get(host, 0) + size
    for host, _, free in ranks:
        if free is not None and free < needed[host]:
            wanted, there = needed[host] / 1e9, free / 1e9
            return f"{SHARED_MEMORY} of {host} has {there:.3f} GB free, and a copy of the state takes {wanted:.3f} GB"
    return None


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Of the storages that are copied, each once: whole ones, as torch stages them."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local]
    # A page is the least that is shared.
    return sum({storage.data_ptr(): -(-storage.nbytes() // 4096) * 4096 for storage in storages}.values())


def _free() -> int | None:
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return None
