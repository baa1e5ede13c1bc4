"""Build the metric sinks of a run from its configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titan_exp.config.groups.experiment import Experiment
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.metrics_jsonl import JsonlSink
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.sinks.sink import ImageSink, LateSink, Row, Sink

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class BestEffortSink:
    """Wraps the sink that `start` builds, and suppresses all its exceptions, including those of construction."""

    def __init__(self, name: str, switch: str, start: Callable[[], Sink]) -> None:
        self._name, self._switch = name, switch
        self._sink: Sink | None = None
        self._guard(self._start, start)

    def log(self, row: Row) -> None:
        """Forward the row while the sink works."""
        if self._sink is not None:
            self._guard(self._sink.log, row)

    def image(self, name: str, step: int, image: np.ndarray) -> None:
        """Forward an image while the sink works, if it takes images."""
        if self._sink is not None and isinstance(self._sink, ImageSink):
            self._guard(self._sink.image, name, step, image)

    def late(self, axis: str, row: Row) -> None:
        """Forward a late row while the sink works, if it takes them."""
        if self._sink is not None and isinstance(self._sink, LateSink):
            self._guard(self._sink.late, axis, row)

    def close(self, state: str) -> None:
        """Close the sink if it still works."""
        sink, self._sink = self._sink, None
        if sink is not None:
            self._guard(sink.close, state)

    def _start(self, start: Callable[[], Sink]) -> None:
        self._sink = start()

    def _guard(self, action: Callable[..., None], *arguments: object) -> None:
        try:
            action(*arguments)
        except Exception as error:  # networks, servers and disks may fail in any way
            self._sink = None
            reason = str(error).strip().partition("\n")[0] or "it gives no reason"
            get_logger().warning(
                "%s gets no more metrics (%s: %s). The run continues, and metrics.jsonl has everything. To turn "
                "this sink off, use %s=false.",
                self._name,
                type(error).__name__,
                reason,
                self._switch,
            )


class TensorBoardSink:
    """Writes event files to `folder`. The first row of an attempt purges older events from its step on (purge_step), so
    that resumed curves do not overlap."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def log(self, row: Row) -> None:
        """Write every known value of the row."""
        step = row["step"]
        assert isinstance(step, int)
        writer = self._open(step)
        for key, value in row.items():
            if key != "step" and value is not None:
                writer.add_scalar(key, value, step)

    def image(self, name: str, step: int, image: np.ndarray) -> None:
        """Write an image."""
        self._open(step).add_image(name, image, step, dataformats="HWC")

    def late(self, axis: str, row: Row) -> None:
        """Write the values of an earlier step, in any order. A row comes first, since that purges events."""
        for key in row.keys() - {axis}:
            if self._writer is not None and row[key] is not None:
                self._writer.add_scalar(key, row[key], row[axis])

    def _open(self, step: int) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._folder.mkdir(exist_ok=True)  # torch would also create a deleted run folder
            self._writer = SummaryWriter(self._folder, purge_step=step, flush_secs=15)
        return self._writer

    def close(self, state: str) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def build_sinks(experiment: Experiment, folder_path: Path, run_id: str, attempt: int) -> list[Sink]:
    """Sinks of rank 0, metrics.jsonl first; the others are best-effort. `attempt` starts at 1."""
    folder = RunFolder(folder_path)
    sinks: list[Sink] = [JsonlSink(folder.metrics, attempt, time.time)]
    if experiment.tracking.tensorboard:
        sinks.append(
            BestEffortSink("TensorBoard", "tracking.tensorboard", lambda: TensorBoardSink(folder.path / "tensorboard"))
        )
    if experiment.tracking.wandb:
        from titan_exp.tracking.sinks.wandb_sink import WandbSink, describe_wandb_run

        def start() -> Sink:
            return WandbSink(describe_wandb_run(experiment, folder, run_id), folder.path, folder.metrics)

        sinks.append(BestEffortSink("W&B", "tracking.wandb", start))
    return sinks
