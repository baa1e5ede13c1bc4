"""File tail: complete lines as other processes append them."""

import json
from collections.abc import Iterator
from pathlib import Path

from titan_exp.tracking.run_folder.metrics_jsonl import decode
from titan_exp.tracking.sinks.sink import Row


class FileTail:
    """Lines appended to a file, which may not exist yet; `from_now` skips existing lines."""

    def __init__(self, path: Path, *, from_now: bool = False) -> None:
        self._path, self._offset = path, 0
        if from_now and path.exists():
            # A torn last line will be truncated and overwritten.
            self._offset = path.read_bytes().rfind(b"\n") + 1

    def lines(self) -> Iterator[str]:
        """Complete lines appended since the last call."""
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
    """Parse metric rows of one attempt; other lines are skipped."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and row.get("attempt") == attempt:
            yield decode(row)
