"""Memory at a chosen step: a text breakdown and, on CUDA, a snapshot for torch's viewer."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.atomic_write import write_atomically
from titan_exp.trainer.profiling.memory_breakdown import MemoryAccount, memory_account

MOST = 500_000
"""Allocations of the step that a snapshot remembers; torch's viewer is slow with more."""


class MemorySnapshot:
    """Writes down what this rank's memory holds after one step; costs nothing where none is asked for.

    Args:
        step: the step; None is never.
        folder: the run's `traces/` folder.
        rank: number of this process.
        device: what trains.
    """

    def __init__(self, step: int | None, folder: Path, *, rank: int, device: torch.device) -> None:
        self._step, self._folder, self._rank, self._device = step, folder, rank, device
        if step is not None and device.type == "cuda":
            # Where what lives was allocated, without the history of all that came and went.
            torch.cuda.memory._record_memory_history("state", stacks="python")

    def before(self, step: int) -> None:
        """Called before each step."""
        if step == self._step and self._device.type == "cuda":
            torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=MOST)

    def after(
        self,
        step: int,
        parts: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        peak: Callable[[], Mapping[str, float | None]],
    ) -> None:
        """Called after each step; `peak` gives the most that was in use, in GiB."""
        if step != self._step:
            return
        account = memory_account(self._device, parts, optimizer)
        try:
            written = write_account(account, self._folder, f"step-{step:08d}", self._rank, _words(peak()))
            get_logger().info("memory after step %d: %s", step, written)
        except OSError as error:
            get_logger().error("%s: memory cannot be written down (%s)", self._folder, error.strerror or error)
        if self._device.type == "cuda":
            torch.cuda.memory._record_memory_history(None)


def write_account(account: MemoryAccount, folder: Path, when: str, rank: int, more: str = "") -> Path:
    """Write `memory-WHEN-rank-*.txt` and, on CUDA, beside it a `.pickle` for https://docs.pytorch.org/memory_viz,
    which nothing here ever reads.

    Raises:
        OSError: the disk is full, or cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"memory-{when}-rank-{rank:05d}.txt"
    write_atomically(path, account.text() + more, durable=False)
    if account.device == "cuda":
        temporary = path.with_suffix(".pickle.tmp")
        torch.cuda.memory._dump_snapshot(str(temporary))
        temporary.replace(path.with_suffix(".pickle"))
    return path


def _words(peak: Mapping[str, float | None]) -> str:
    known = ", ".join(f"{name} {value:.2f} GiB" for name, value in peak.items() if value is not None)
    return f"\nmost at any time since the row before: {known}\n"
