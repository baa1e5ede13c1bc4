"""Memory at a chosen step: a text breakdown and, on CUDA, a snapshot for torch's viewer."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.atomic_write import write_atomically
from titan_exp.trainer.profiling.memory_breakdown import MemoryBreakdown, memory_breakdown

MAX_EVENTS = 500_000
"""Allocation events that a snapshot keeps; torch's viewer is slow with more."""


class MemorySnapshot:
    """Writes the memory breakdown of this rank after step `step` into the run's `traces` folder; None never does."""

    def __init__(self, step: int | None, folder: Path, device: torch.device) -> None:
        self._step, self._folder, self._rank, self._device = step, folder, dist.get_rank(), device
        if step is not None and device.type == "cuda":
            # Stacks of live allocations, without the history of freed ones.
            torch.cuda.memory._record_memory_history("state", stacks="python")

    def before(self, step: int) -> None:
        """Called before each step."""
        if step == self._step and self._device.type == "cuda":
            torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=MAX_EVENTS)

    def after(
        self,
        step: int,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        compute_weights: Mapping[nn.Parameter, Tensor],
        peak: Callable[[], Mapping[str, float | None]],
    ) -> None:
        """Called after each step; `peak` returns peaks in GiB."""
        if step != self._step:
            return
        memory = memory_breakdown(self._device, parts, optimizer, compute_weights)
        try:
            written = write_breakdown(memory, self._folder, f"step-{step:08d}", self._rank, _peak_line(peak()))
            get_logger().info("memory after step %d: %s", step, written)
        except OSError as error:
            get_logger().error("%s: the memory breakdown cannot be written (%s)", self._folder, error.strerror or error)
        if self._device.type == "cuda":
            torch.cuda.memory._record_memory_history(None)


def write_breakdown(memory: MemoryBreakdown, folder: Path, when: str, rank: int, more: str = "") -> Path:
    """Write `memory-WHEN-rank-*.txt` and, on CUDA, a `.pickle` for the viewer at https://docs.pytorch.org/memory_viz.

    Raises:
        OSError: the disk is full or read-only.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"memory-{when}-rank-{rank:05d}.txt"
    write_atomically(path, memory.text() + more, durable=False)
    if memory.device == "cuda":
        temporary = path.with_suffix(".pickle.tmp")
        torch.cuda.memory._dump_snapshot(str(temporary))
        temporary.replace(path.with_suffix(".pickle"))
    return path


def _peak_line(peak: Mapping[str, float | None]) -> str:
    known = ", ".join(f"{name} {value:.2f} GiB" for name, value in peak.items() if value is not None)
    return f"\npeak since the previous row: {known}\n"
