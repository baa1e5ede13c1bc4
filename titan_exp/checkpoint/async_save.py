"""Asynchronous saving: tensors are staged in shared memory, and a process writes them."""

import contextlib
import functools
import logging
import multiprocessing
import os
import shutil
import signal
import socket
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.distributed_c10d import _get_default_store

from titan_exp.ops.autograd import local_tensor
from titan_exp.parallel.mesh import LOOPBACK, gather_objects, loopback_store
from titan_exp.tracking.logging import get_logger

SHARED_MEMORY = Path("/dev/shm")


def shared_memory_shortage(state: Mapping[str, Tensor], group: dist.ProcessGroup) -> str | None:
    """Describe the first host whose shared memory cannot hold the states of all its ranks; None if all can. Collective
    over the group, with the same result on all ranks."""
    # torch stages whole storages, whose bytes are rounded up to pages.
    storages = [local_tensor(tensor).untyped_storage() for tensor in state.values()]
    pages = {storage.data_ptr(): -(-storage.nbytes() // 4096) * 4096 for storage in storages}
    free_bytes: int | None = None
    with contextlib.suppress(OSError):
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    ranks = gather_objects((socket.gethostname(), sum(pages.values()), free_bytes), group)
    needed: dict[str, int] = {}
    for host, size, _ in ranks:
        needed[host] = needed.get(host, 0) + size
    for host, _, free in ranks:
        if free is not None and free < needed[host]:
            size = f"a copy of the state takes {needed[host] / 1e9:.3f} GB"
            return f"{SHARED_MEMORY} of {host} has {free / 1e9:.3f} GB free, and {size}"
    return None


JOIN_LIMIT = timedelta(minutes=5)  # timeout of the save processes' rendezvous
POLL_SECONDS = 0.5  # interval in seconds of checks for failures of other ranks' save processes
_torch_subprocess = executor._AsyncCheckpointProcess._checkpointing_subprocess


class AsyncSaveProcess:
    """Save process of one rank; torch starts it with the first save. `group` is a CPU group of all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._failed = False
        self._generation = 0
        self._other_children = set(multiprocessing.active_children())
        if "TITAN_EXP_RENDEZVOUS" in os.environ or dist.get_world_size() == 1:
            # Save processes rendezvous over TCP; on a single machine the address is the loopback.
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        executor._AsyncCheckpointProcess._checkpointing_subprocess = staticmethod(run_save_process)

    def restart_if_any_failed(self) -> None:
        """Kill the process if any rank's has failed, so that the next save starts a new one; collective."""
        started = executor._CHECKPOINT_PROCESS is not None
        failed = torch.tensor([self._failed or (started and not _is_alive())], dtype=torch.uint8)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if failed:
            self.kill()
            self._failed = False
            self._generation += 1

    def wait(self, future: Future[Any]) -> None:
        """Wait until it is written. Raises OSError if the process failed, CheckpointException if any rank did."""
        while True:
            try:
                future.result(timeout=POLL_SECONDS)
                return
            except BaseException as error:
                if not future.done():
                    if not isinstance(error, TimeoutError):
                        raise
                    if _get_default_store().check([self._failure_key]):
                        self._fail()
                    continue
                lost = isinstance(error, (ConnectionError, EOFError))
                reported = isinstance(error, (OSError, dcp.CheckpointException)) and not lost
                if (reported and _is_alive()) or not isinstance(error, (Exception, dcp.CheckpointException)):
                    raise
                self._fail()
                cause = (str(error).strip() or type(error).__name__).partition("\n")[0]
                died = f"the checkpoint save process of this or another rank died ({cause})"
                raise OSError(f"{died}, and the next save starts a new one") from error

    def kill(self) -> None:
        """Kill the process at any point of its work."""
        # By type: torch has no handle before the process has completed its rendezvous.
        for process in set(multiprocessing.active_children()) - self._other_children:
            if isinstance(process, SpawnProcess):
                process.kill()
                process.join()
        executor._CHECKPOINT_PROCESS = None

    def _fail(self) -> None:
        self._failed = True
        _get_default_store().set(self._failure_key, "1")
        self.kill()

    @property
    def _failure_key(self) -> str:
        return f"titan_exp/writing_process_failed/{self._generation}"


def run_save_process(pg_init_info: executor._ProcessGroupInitInfo, parent_conn: Any) -> None:
    """Entry point of the process: torch's loop without its log on standard error. It receives Ctrl-C and the
    scheduler's signals, too, and ignores them, because the trainer handles them by saving."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Failures are raised and logged in the trainer.
    logging.disable(logging.ERROR)
    if pg_init_info.tcp_store_master_addr == LOOPBACK:
        # torch's own store listens on all interfaces.
        rank, world, port = pg_init_info.global_rank, pg_init_info.world_size, pg_init_info.tcp_store_master_port
        store = dist.HashStore() if world == 1 else loopback_store(rank, port, JOIN_LIMIT)
        dist.init_process_group = functools.partial(dist.init_process_group, store=store, rank=rank, world_size=world)
    # If the trainer was killed, a failed reply needs no traceback.
    with contextlib.suppress(ConnectionError, EOFError):
        _torch_subprocess(pg_init_info, parent_conn)


def _is_alive() -> bool:
    process = executor._CHECKPOINT_PROCESS
    return process is not None and process._save_process.is_alive()


class AsyncSaver:
    """Background saver of a run, one save at a time, in mode `async`, `async_pinned` (CUDA) or `async_process`."""

    def __init__(self, mode: str, group: dist.ProcessGroup) -> None:
        self._group = group
        self._process = AsyncSaveProcess(group) if mode == "async_process" else None
        self._stager: AsyncStager = _Copies() if mode == "async" else _ReusedMemory(pinned=mode == "async_pinned")
        self._staged = False

    def start(self, state: dict[str, Tensor], writer: dcp.StorageWriter) -> Future[Any]:
        """Stage the state and start writing it. The tensors may change after return."""
        if self._process is not None:
            self._process.restart_if_any_failed()
            if not self._staged:
                self._fall_back_without_shared_memory(state)
        self._staged = True
        kind = AsyncCheckpointerType.THREAD if self._process is None else AsyncCheckpointerType.PROCESS
        where = {"storage_writer": writer, "process_group": self._group}
        future = dcp.async_save(state, **where, async_checkpointer_type=kind, async_stager=self._stager)
        assert isinstance(future, Future), "staging is synchronous in every mode"
        return future

    def wait(self, future: Future[Any]) -> None:
        """Wait until a save has ended; raises like `AsyncSaveProcess.wait`."""
        if self._process is None:
            future.result()
        else:
            self._process.wait(future)

    def close(self) -> None:
        """Release staging memory and end the save process; no save may be pending."""
        self._stager.close()
        if self._process is not None:
            self._process.kill()

    def _fall_back_without_shared_memory(self, state: Mapping[str, Tensor]) -> None:
        """Switch to a thread if the state does not fit into shared memory; staging would raise SIGBUS."""
        shortage = shared_memory_shortage(state, self._group)
        if shortage is None:
            return
        get_logger().error(
            "checkpoint.mode=async_process: %s. A thread writes checkpoints instead, as with mode=async. "
            "To enlarge it, use docker run --shm-size=64g, or mount -o remount,size=64g /dev/shm.",
            shortage,
        )
        self._stager.close()
        self._stager, self._process = _Copies(), None


class _Copies(AsyncStager):
    """Stages into new host memory that only this save holds. torch's default stager keeps its memory."""

    _synchronize_after_execute = False

    def stage(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy every tensor."""
        return {key: value.detach().to("cpu", copy=True) for key, value in state_dict.items()}

    def close(self) -> None:
        """Do nothing: no memory is held."""


class _ReusedMemory(DefaultStager):
    """Stages into pinned or shared memory, and keeps it for later saves until it is closed."""

    def __init__(self, *, pinned: bool) -> None:
        super().__init__(
            StagingOptions(
                use_pinned_memory=pinned,
                use_shared_memory=not pinned,
                use_async_staging=False,
                use_non_blocking_copy=pinned,
            )
        )
        # torch 2.11 closes the stager after every save, and a closed one cannot copy.
        self._release = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None

    def close(self) -> None:
        """Release the memory; nothing can be staged afterwards."""
        super().close()
        self._release()
