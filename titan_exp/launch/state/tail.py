"""Files read while others write them: only whole lines, each once."""

import json
from collections.abc import Iterator
from pathlib import Path

from titan_exp.tracking.sinks.sink import Row


class FileTail:
    """The lines that are added to a file, which need not be there yet.

    Args:
        path: the file.
        from_now: leave out the lines that it has already.
    """

    def __init__(self, path: Path, *, from_now: bool = False) -> None:
        self._path, self._offset = path, 0
        if from_now and path.exists():
            # A last line without its end was torn by a death and will be cut off: what comes next stands there.
            self._offset = path.read_bytes().rfind(b"\n") + 1

    def lines(self) -> Iterator[str]:
        """The whole lines added since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        end = text.rfind(b"\n") + 1
        self._offset += end
        yield from text[:end].decode(errors="replace").splitlines()


def rows(lines: Iterator[str], attempt: int) -> Iterator[Row]:
    """The rows of metrics among lines that belong to attempt number `attempt`."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("attempt") == attempt:
            # What is not finite is written as text.
            yield {key: float(value) if isinstance(value, str) else value for key, value in row.items()}
