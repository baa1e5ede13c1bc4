"""Saving in the background: how the state is copied while training waits, and who writes the copy.

`async` copies into fresh memory and a thread writes; `async_pinned` copies from the GPU into pinned memory that is kept
from save to save; `async_process` copies into shared memory and a process of its own writes, beside Python's lock.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from titan_exp.checkpoint.dcp.async_process import AsyncSaveProcess
from titan_exp.checkpoint.dcp.shared_memory import shared_memory_shortage
from titan_exp.tracking.logging import get_logger


class AsyncSaver:
    """The background saves of one run, one at a time: the next may begin when the last has ended.

    Args:
        mode: `async`, `async_pinned` (CUDA) or `async_process`.
        group: all ranks, over the CPU.
    """

    def __init__(self, mode: str, group: dist.ProcessGroup) -> None:
        self._group = group
        self._process = AsyncSaveProcess(group) if mode == "async_process" else None
        self._stager = _stager(pinned=mode == "async_pinned") if mode != "async" else None
        self._staged = False

    def start(self, state: dict[str, Tensor], writer: dcp.StorageWriter) -> Future[Any]:
        """Copy the state and begin to write it. When this returns, the tensors may change."""
        if self._process is not None:
            self._process.restart_if_any_failed()
            if not self._staged:
                self._fall_back_without_shared_memory(state)
        self._staged = True
        if self._stager is None:
            # torch copies to the CPU before it returns, but takes what is there already as it is.
            state = {key: value.clone() if value.device.type == "cpu" else value for key, value in state.items()}
        future = dcp.async_save(
            state,
            storage_writer=writer,
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.THREAD
            if self._process is None
            else AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        assert isinstance(future, Future), "staging is synchronous in every mode"
        return future

    def result(self, future: Future[Any]) -> None:
        """Wait until a save has ended.

        Raises:
            OSError: it could not be written, or the process that writes has died.
            CheckpointException: the same, on any rank.
        """
        if self._process is None:
            future.result()
        else:
            self._process.result(future)

    def close(self) -> None:
        """Give back memory, and end the writing process; no save is on its way."""
        if self._stager is not None:
            self._stager.close()
        if self._process is not None:
            self._process.end()

    def _fall_back_without_shared_memory(self, state: Mapping[str, Tensor]) -> None:
        """Where the state does not fit into shared memory: writing to it would end this process with a bus error."""
        missing = shared_memory_shortage(state, self._group)
        if missing is None:
            return
        get_logger().error(
            "checkpoint.mode=async_process: %s. A thread writes the checkpoints instead, as with mode=async. "
            "A larger one: docker run --shm-size=64g, or mount -o remount,size=64g /dev/shm.",
            missing,
        )
        assert self._stager is not None, "this mode has one"
        self._stager.close()
        self._stager = self._process = None


def _stager(*, pinned: bool) -> DefaultStager:
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned,
            use_shared_memory=not pinned,
            use_async_staging=False,
            use_non_blocking_copy=pinned,
        )
    )
