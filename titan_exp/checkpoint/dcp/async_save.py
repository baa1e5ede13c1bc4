"""Async save: the state is staged while training pauses, and the copy is written in the background.

`async` stages into new memory, once, and a thread writes; `async_pinned` stages from the GPU into pinned memory that is
reused between saves; `async_process` stages into shared memory and another process writes, outside Python's GIL.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from titan_exp.checkpoint.dcp.async_process import AsyncSaveProcess
from titan_exp.checkpoint.dcp.shared_memory import shared_memory_shortage
from titan_exp.tracking.logging import get_logger


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
        future = dcp.async_save(
            state,
            storage_writer=writer,
            process_group=self._group,
            async_checkpointer_type=kind,
            async_stager=self._stager,
        )
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
            "To enlarge it: docker run --shm-size=64g, or mount -o remount,size=64g /dev/shm.",
            shortage,
        )
        self._stager.close()
        self._stager, self._process = _Copies(), None


class _Copies(AsyncStager):
    """Stages into new memory of the host that the save alone holds.

    torch's default stager keeps its memory for the next save too.
    """

    _synchronize_after_execute = False

    def stage(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy every tensor."""
        return {key: value.detach().to("cpu", copy=True) for key, value in state_dict.items()}

    def close(self) -> None:
        """Hold nothing."""


class _ReusedMemory(DefaultStager):
    """Stages into pinned or else shared memory, and keeps it for the next save until it is closed."""

    def __init__(self, *, pinned: bool) -> None:
        super().__init__(
            StagingOptions(
                use_pinned_memory=pinned,
                use_shared_memory=not pinned,
                use_async_staging=False,
                use_non_blocking_copy=pinned,
            )
        )
        # torch 2.11 closes it after every save, and once closed it cannot copy.
        self._release = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None

    def close(self) -> None:
        """Release the memory; nothing can be staged afterwards."""
        super().close()
        self._release()
