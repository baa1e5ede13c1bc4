"""CUDA graph capture behind a two-call interface: warm up, record."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Recording:
    """Captured work."""

    replay: Callable[[], None]
    """Run the same kernels on the same addresses. No Python runs: Python numbers keep their captured values."""
    description: str
    """Kind and memory of the graph, for the log."""


class Recorder(Protocol):
    """Captures a function without arguments that neither synchronizes the device nor reads host memory."""

    def warmup(self, work: Callable[[], None]) -> None:
        """Run the work once, under the conditions of the capture."""
        ...

    def record(self, work: Callable[[], None]) -> Recording:
        """Capture the work and run it once."""
        ...


class CudaRecorder:
    """Captures into a CUDA graph with its own memory pool. Not yet run on a GPU.

    Warm-up and capture share one side stream, as torch requires: autograd nodes synchronize with the stream on which
    they were created.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def warmup(self, work: Callable[[], None]) -> None:
        """Run the work on the capture stream, synchronized with the current stream before and after."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Recording:
        """Capture, then replay, because capturing executes nothing.

        Raises:
            RuntimeError: CUDA cannot capture the work; a note names the option to switch off.
        """
        # The trainer disables automatic collection; garbage would keep memory out of the graph's pool.
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that pin batches or save checkpoints may allocate during the capture.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            error.add_note("This pass was being captured as a CUDA graph; compile.cuda_graphs=false trains without.")
            raise
        graph.replay()
        return Recording(graph.replay, f"a CUDA graph with a memory pool of {_pool_bytes(graph) / 2**20:,.1f} MiB")


def _pool_bytes(graph: torch.cuda.CUDAGraph) -> int:
    """Bytes in the graph's own memory pool."""
    pool = tuple(graph.pool())
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment.get("segment_pool_id", ())) == pool)
