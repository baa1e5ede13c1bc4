"""Memory at a chosen step: a text breakdown and, on CUDA, a snapshot for torch's viewer."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from titan_exp.config.groups.tracking import ProfilingConfig
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.atomic_write import write_atomically
from titan_exp.trainer.part import Part, Run, Step
from titan_exp.trainer.profiling.memory_breakdown import MemoryBreakdown, memory_breakdown

if TYPE_CHECKING:
    from titan_exp.trainer.train_state import TrainState

MAX_EVENTS = 500_000
"""Allocation events that a snapshot keeps; torch's viewer is slow with more."""


def record_live_allocations(config: ProfilingConfig, device: torch.device) -> None:
    """Record stacks of live allocations, without the history of freed ones, from before the model is built."""
    if config.memory_step is not None and device.type == "cuda":
        torch.cuda.memory._record_memory_history("state", stacks="python")


class MemorySnapshot(Part):
    """Writes the memory breakdown of this rank after step `step` into the run's `traces` folder."""

    name = "memory_snapshot"
    isolated = False  # it runs nothing of a model's

    def __init__(self, step: int, folder: Path, state: "TrainState") -> None:
        self._step, self._folder, self._rank, self._state = step, folder, dist.get_rank(), state
        self._device = state.mesh.device

    def begin(self, run: Run) -> None:
        """Read the peak where rows have it from."""
        self._memory = run.report.memory

    def before(self, step: int) -> None:
        """Record the whole history of the step."""
        if step == self._step and self._device.type == "cuda":
            torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=MAX_EVENTS)

    def after(self, step: Step) -> None:
        """Write the breakdown after its step."""
        if step.step != self._step:
            return
        model = self._state.model
        memory = memory_breakdown(self._device, model.parts, self._state.optimizer, model.weights.copies)
        peak = _peak_line(self._memory.read())
        try:
            written = write_breakdown(memory, self._folder, f"step-{step.step:08d}", self._rank, peak)
            get_logger().info("memory after step %d: %s", step.step, written)
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
