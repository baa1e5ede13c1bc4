"""TensorBoard sink: one scalar per metric key."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from titan_exp.tracking.sinks.sink import Row

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


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

    def _open(self, step: int) -> "SummaryWriter":
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
