"""Recording what a piece of work does to memory, and doing it again without Python: CUDA graphs, behind two calls."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Recording:
    """Work that was recorded."""

    replay: Callable[[], None]
    """Does the same to the same addresses. Nothing of Python runs: numbers of Python's are what they were."""
    description: str
    """What it is and what it holds, for the log."""


class Recorder(Protocol):
    """Records work: a function without arguments that waits for no device and takes nothing from the host's memory."""

    def warmup(self, work: Callable[[], None]) -> None:
        """Do the work as it will be recorded, so that whatever is set up at a first call is there."""
        ...

    def record(self, work: Callable[[], None]) -> Recording:
        """Record the work after its warm-up; it has run once when this returns."""
        ...


class CudaRecorder:
    """Records into a CUDA graph with a memory pool of its own. Never run on a GPU so far.

    One stream of its own is for warm-up and recording, as torch asks for: nodes of autograd that wait for the stream
    they were made on then wait for this one.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def warmup(self, work: Callable[[], None]) -> None:
        """On the stream of the recording, which waits for the current one, and that for it."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Recording:
        """Capture, then replay: while it captures a GPU does nothing.

        Raises:
            RuntimeError: CUDA cannot capture something of the work; a note says how to do without.
        """
        # The trainer keeps garbage, and what it refers to would not be freed for the graph's pool.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that pin batches or save checkpoints may allocate meanwhile; only this one may not wait.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            error.add_note("This pass was being recorded as a CUDA graph; compile.cuda_graphs=false trains without.")
            raise
        graph.replay()
        return Recording(graph.replay, f"a CUDA graph whose memory pool holds {_held(graph) / 2**20:,.1f} MiB")


def _held(graph: torch.cuda.CUDAGraph) -> int:
    """Bytes that the allocator keeps for a graph alone."""
    pool = tuple(graph.pool())
    segments = torch.cuda.memory_snapshot()
    return sum(it["total_size"] for it in segments if tuple(it.get("segment_pool_id", ())) == pool)
