"""Async checkpoint process per rank: torch's, without its log, and restarted after a failure.

The save processes of all ranks communicate. If one is killed, the others would block for half an hour: its rank
notifies the others through the store, each rank kills its own process, and the next save starts new ones.
"""

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.distributed_c10d import _get_default_store

from titan_exp.parallel.collectives import LOOPBACK, loopback_store

JOIN_LIMIT = timedelta(minutes=5)
"""Timeout of the save processes' rendezvous."""
POLL_SECONDS = 0.5
"""Interval in seconds of checks for failures of other ranks' save processes."""
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
        """Wait until the checkpoint is written. Raises OSError if writing or the process failed, CheckpointException if
        any rank failed."""
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
                reported = isinstance(error, (OSError, dcp.CheckpointException)) and not isinstance(
                    error, (ConnectionError, EOFError)
                )
                if (reported and _is_alive()) or not isinstance(error, (Exception, dcp.CheckpointException)):
                    raise
                self._fail()
                cause = (str(error).strip() or type(error).__name__).partition("\n")[0]
                raise OSError(
                    f"the checkpoint save process of this or another rank died ({cause}); the next save starts a new "
                    "one"
                ) from error

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
    """Entry point of the process: torch's loop without its log on standard error.

    It ignores Ctrl-C and the scheduler's signals, which it also receives: the trainer handles them by saving.
    """
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
