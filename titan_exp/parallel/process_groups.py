"""Process groups by name, for custom ops; timeouts; and collectives under the names of the installed torch version."""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

# Names after torch 2.11; the older names still work with a warning.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout


LOOPBACK = "127.0.0.1"


def served_store(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Serve a store, at a free port if `port` is 0. On the loopback address only this machine's processes reach it; by
    itself torch listens on all interfaces, whatever the host."""
    if host != LOOPBACK:
        return dist.TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)
    listener = socket.create_server((host, port))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def loopback_store(rank: int, port: int, timeout: timedelta) -> dist.TCPStore:
    """Store of ranks on one machine, which rank 0 serves."""
    if rank == 0:
        return served_store(LOOPBACK, port, timeout)
    return dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timeout, wait_for_workers=False)


def group_named(name: str) -> dist.ProcessGroup:
    """Process group with this `group_name`."""
    return c10d._resolve_process_group(name)  # type: ignore[arg-type]  # torch has a type of its own for these strings


def run_timeout() -> timedelta | None:
    """Timeout of the default group's collectives; None of a backend that has none.

    A new group would have torch's, 10 or 30 minutes, after which NCCL ends a rank before its stacks are written.
    """
    group, host = c10d._get_default_group(), torch.device("cpu")
    options = group._get_backend(host).options if host in group._device_types else None
    return getattr(options, "_timeout", None)


def give_run_timeout(group: dist.ProcessGroup) -> None:
    """Give a group that torch made the timeout of the default group, on each of its backends."""
    timeout = run_timeout()
    if timeout is not None:
        _set_timeout(timeout, group)


def gather_documents(documents: Tensor, group: str) -> Tensor:
    """Gather document numbers [batch, part] of the group's ranks to [degree, batch, part]."""
    ranks = group_named(group)
    gathered = documents.new_empty((ranks.size() * documents.shape[0], documents.shape[1]))
    all_gather(gathered, documents.contiguous(), group=ranks)
    return gathered.unflatten(0, (ranks.size(), -1))
