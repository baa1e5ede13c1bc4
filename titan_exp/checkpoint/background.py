"""Saving in the background: how the state is copied while training waits, and who writes the copy.

`async` copies into fresh memory and a thread writes; `async_pinned` copies from the GPU into pinned memory that is kept
from save to save; `async_process` copies into shared memory and a process of its own writes, beside Python's lock.
"""

import os
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


class BackgroundSaves:
    """The background saves of one run, one at a time: the next may begin when the last has ended.

    Args:
        mode: `async`, `async_pinned` (CUDA) or `async_process`.
        group: all ranks, over the CPU.
    """

    def __init__(self, mode: str, group: dist.ProcessGroup) -> None:
        self._process, self._group = mode == "async_process", group
        self._stager: DefaultStager | None = None
        if mode == "async_pinned":
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=True, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=True
                )
            )
        elif self._process:
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=True,
                    use_async_staging=False,
                    use_non_blocking_copy=False,
                )
            )
            if "TITAN_EXP_RENDEZVOUS" in os.environ or dist.get_world_size() == 1:
                # The writing processes meet over TCP, and on one machine its name need not be known.
                os.environ.setdefault("MASTER_ADDR", "127.0.0.1")

    def start(self, state: dict[str, Tensor], writer: dcp.StorageWriter) -> Future[Any]:
        """Copy the state and begin to write it. When this returns, the tensors may change."""
        if self._stager is None:
            # torch copies to the CPU before it returns, but takes what is there already as it is.
            state = {key: value.clone() if value.device.type == "cpu" else value for key, value in state.items()}
        future = dcp.async_save(
            state,
            storage_writer=writer,
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if self._process else AsyncCheckpointerType.THREAD,
            async_stager=self._stager,
        )
        assert isinstance(future, Future), "staging is synchronous in every mode"
        return future

    def close(self) -> None:
        """Give back memory, and end the writing process; no save is on its way."""
        if self._stager is not None:
            self._stager.close()
        process, _async_process_executor._CHECKPOINT_PROCESS = _async_process_executor._CHECKPOINT_PROCESS, None
        if process is not None:
            # torch ends it nowhere else, and it would say goodbye with a traceback.
            process.__del__()
