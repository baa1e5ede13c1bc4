"""TensorBoard sink: one scalar per metric key."""

from pathlib import Path
from typing import TYPE_CHECKING

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
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._folder.mkdir(exist_ok=True)  # torch would also create a deleted run folder
            self._writer = SummaryWriter(self._folder, purge_step=step, flush_secs=15)
        for key, value in row.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(key, value, step)

    def close(self, state: str) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
