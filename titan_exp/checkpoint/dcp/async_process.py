"""The process that writes checkpoints beside a rank: torch's, made quiet, and replaced when it has died.

The writing processes of all ranks talk to each other. Where one dies, the others would wait for it for half an hour,
so each rank tells the others, ends its own, and the next save begins with new ones.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
from concurrent.futures import Future
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.distributed_c10d import _get_default_store

POLL_SECONDS = 0.5
"""Seconds between looks at whether another rank's process has died."""
_serve = executor._AsyncCheckpointProcess._checkpointing_subprocess


class AsyncSaveProcess:
    """Of one rank; torch starts it with the first save.

    Args:
        group: all ranks, over the CPU.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._failed = False
        self._generation = 0
        self._others = set(multiprocessing.active_children())
        if "TITAN_EXP_RENDEZVOUS" in os.environ or dist.get_world_size() == 1:
            # The writing processes meet over TCP, and on one machine its name need not be known.
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        executor._AsyncCheckpointProcess._checkpointing_subprocess = staticmethod(run_save_process)

    def restart_if_any_failed(self) -> None:
        """End it where that of any rank has failed, so that the next save starts a new one; all ranks together."""
        failed = torch.tensor([self._failed or (self._begun and not _alive())], dtype=torch.uint8)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._group)
        if failed:
            self.end()
            self._failed = False
            self._generation += 1

    def result(self, future: Future[Any]) -> None:
        """Wait until it has written.

        Raises:
            OSError: it could not write, or has died.
            CheckpointException: the same, on any rank.
        """
        while True:
            try:
                future.result(timeout=POLL_SECONDS)
                return
            except BaseException as error:
                if not future.done():
                    if not isinstance(error, TimeoutError):
                        raise
                    if _store().check([self._key]):
                        self._give_up()
                    continue
                answered = isinstance(error, (OSError, dcp.CheckpointException)) and not isinstance(
                    error, (ConnectionError, EOFError)
                )
                if (answered and _alive()) or not isinstance(error, (Exception, dcp.CheckpointException)):
                    raise
                self._give_up()
                raise OSError(
                    f"the process that writes checkpoints has died, or another rank's has ({_first_line(error)}); "
                    "the next save starts a new one"
                ) from error

    def end(self) -> None:
        """End it, whatever it does."""
        # By kind: until it has met those of the other ranks, torch has not given it a name.
        for process in set(multiprocessing.active_children()) - self._others:
            if isinstance(process, SpawnProcess):
                process.kill()
                process.join()
        executor._CHECKPOINT_PROCESS = None

    def _give_up(self) -> None:
        self._failed = True
        _store().set(self._key, "1")
        self.end()

    @property
    def _key(self) -> str:
        return f"titan_exp/writing_process_failed/{self._generation}"

    @property
    def _begun(self) -> bool:
        return executor._CHECKPOINT_PROCESS is not None


def run_save_process(pg_init_info: executor._ProcessGroupInitInfo, parent_conn: Any) -> None:
    """What the process runs: torch's loop without its diary on standard error.

    A Ctrl-C or a scheduler's signal reaches it as well; what to do about it is for the trainer to say, which saves.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Its failures are raised, and told in words, in the trainer.
    logging.disable(logging.ERROR)
    # A trainer that was killed hears no answer, and nobody needs a traceback about it.
    with contextlib.suppress(ConnectionError, EOFError):
        _serve(pg_init_info, parent_conn)


def _alive() -> bool:
    process = executor._CHECKPOINT_PROCESS
    return process is not None and process._save_process.is_alive()


def _store() -> dist.Store:
    return _get_default_store()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]
