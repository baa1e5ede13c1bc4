"""TensorBoard files in the run folder, one scalar per metric under the name it has everywhere."""

from pathlib import Path
from typing import TYPE_CHECKING

from titan_exp.tracking.sinks.sink import Row

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoardSink:
    """Writes to `folder`. The first row says where this start of the run begins: older events from that step on are
    declared void (purge_step), so that curves do not double back after a resume."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def log(self, row: Row) -> None:
        """Write every known value of the row."""
        step = row["step"]
        assert isinstance(step, int)
        if self._writer is None:
            self._writer = _open(self._folder, step)
        for key, value in row.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(key, value, step)

    def close(self, state: str) -> None:
        """Write out what is buffered."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _open(folder: Path, first_step: int) -> "SummaryWriter":
    from torch.utils.tensorboard.writer import SummaryWriter

    return SummaryWriter(folder, purge_step=first_step, flush_secs=15)
