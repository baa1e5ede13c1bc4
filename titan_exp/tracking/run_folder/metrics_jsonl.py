"""metrics.jsonl, the truth about a run: one flushed line of JSON per logged step, readable after any death.

JSON has no NaN: a number that is not finite is written as the string "NaN", "Infinity" or "-Infinity", as in
protobuf's JSON mapping, and null means unknown. `float(x)` in Python and `Number(x)` in JavaScript read all of them.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.sinks.sink import Row, Value

TAIL = 16384
"""Bytes from the end that hold the newest rows, dozens of them."""


class JsonlSink:
    """Appends rows to `path`; a line torn by an earlier death is removed first.

    Each row reaches the operating system before `log` returns, so it survives the death of the process. On a disk that
    is full the rows wait in memory, the log says so, and the next row tries again; at the end it is an error.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        repair(path)
        self._attempt = attempt
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._failed = False

    def log(self, row: Row) -> None:
        """Write the row, with this attempt's number if it has none."""
        stamped = {key: _encode(value) for key, value in row.items()}
        stamped.setdefault("attempt", self._attempt)
        self._waiting += json.dumps(stamped, allow_nan=False).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not self._failed:
                get_logger().error(
                    "%s cannot be written (%s). Training goes on; the rows wait in memory until it can, and are lost "
                    "if the run dies before.",
                    self._path,
                    error.strerror or error,
                )
            self._failed = True
            return
        if self._failed:
            self._failed = False
            get_logger().info("%s is written again; no row is missing", self._path)

    def close(self, state: str) -> None:
        """Make the file durable and close it.

        Raises:
            OSError: rows are waiting, and the disk still has no room for them.
        """
        if not self._file.closed:
            try:
                self._write()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()

    def _write(self) -> None:
        while self._waiting:
            # A disk that fills up takes the beginning of a line; the rest follows when there is room.
            self._waiting = self._waiting[self._file.write(self._waiting) :]


def read_metrics(path: Path) -> list[dict[str, Value]]:
    """Rows of a metrics file in the order of steps, one per step.

    After a resume the steps past the restored checkpoint are logged again: the highest attempt's row is kept. Rows of
    one step and one attempt are joined. A torn last line is left out, so a run may be read while it writes.

    Raises:
        UserError: a line before the last is not a row.
    """
    if not path.exists():
        return []
    rows: dict[int, dict[str, Value]] = {}
    lines = [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line]
    for number, line in lines:
        row = _parse(line)
        if row is not None:
            _keep(rows, row)
        elif number < lines[-1][0]:
            raise UserError(f"{path}, line {number}: not a row of metrics. Remove that line; the others are kept.")
    return [rows[step] for step in sorted(rows)]


def read_last_values(path: Path) -> dict[str, Value]:
    """The newest value of every key, from the end of the file alone: quick however long the run was."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return {}
    values: dict[str, Value] = {}
    for line in lines:
        row = _parse(line)  # None where the file was entered in the middle of a line
        values |= {} if row is None else {key: value for key, value in row.items() if value is not None}
    return values


def decode(row: Mapping[str, Any]) -> dict[str, Value]:
    """A row with the strings that stand for numbers which are not finite read back."""
    return {key: float(value) if isinstance(value, str) else value for key, value in row.items()}


def repair(path: Path) -> None:
    """Cut off what a death left of a half-written last line; a last line that only lacks its end is ended."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        text = file.read()
        end = text.rfind(b"\n") + 1
        if end == len(text):
            return
        if _parse(text[end:]) is not None:
            file.write(b"\n")
        else:
            file.truncate(end)


def _keep(rows: dict[int, dict[str, Value]], row: dict[str, Value]) -> None:
    step = row["step"]
    assert isinstance(step, int)
    known = rows.get(step)
    if known is None or _attempt(row) > _attempt(known):
        rows[step] = row
    elif _attempt(row) == _attempt(known):
        known.update(row)


def _attempt(row: dict[str, Value]) -> float:
    return row.get("attempt") or 0


def _parse(line: bytes) -> dict[str, Value] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return decode(row)


def _encode(value: Value) -> Value | str:
    if value is None or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
