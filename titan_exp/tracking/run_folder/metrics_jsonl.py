"""metrics.jsonl, the primary record of metrics: one JSON line per logged step, readable after any crash.

JSON has no NaN: non-finite numbers are written as the strings "NaN", "Infinity" and "-Infinity", as in protobuf's JSON
mapping, and null means unknown. `float(x)` in Python and `Number(x)` in JavaScript read all of them.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.sinks.sink import Value

TAIL_BYTES = 16384
"""Bytes read from the end of the file for the newest rows; they hold dozens, unless a row has many metrics."""

TAIL_ROWS = 8
"""Rows that are read at least, if there are as many."""


class JsonlSink:
    """Appends rows to `path`; a line torn by an earlier crash is removed first.

    Writes are unbuffered, so rows survive a killed process. On a full disk, rows are kept in memory, the error is
    logged, and the next row retries; `close` raises if rows are left.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        repair(path)
        self._attempt = attempt
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._buffer = b""
        self._failed = False

    def log(self, row: Mapping[str, Value | Sequence[int]]) -> None:
        """Write the row, with this attempt's number if it has none."""
        encoded = {key: _encode(value) for key, value in row.items()}
        encoded.setdefault("attempt", self._attempt)
        self._buffer += json.dumps(encoded, allow_nan=False).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not self._failed:
                get_logger().error(
                    "%s cannot be written (%s). Training continues; rows are kept in memory until it can, and are lost "
                    "if the run is killed before.",
                    self._path,
                    error.strerror or error,
                )
            self._failed = True
            return
        if self._failed:
            self._failed = False
            get_logger().info("%s is written again; no row is missing", self._path)

    def close(self, state: str) -> None:
        """Fsync and close the file. Raises OSError if rows are left in memory and the disk is still full."""
        if not self._file.closed:
            try:
                self._write()
                os.fsync(self._file.fileno())
            finally:
                self._file.close()

    def _write(self) -> None:
        while self._buffer:
            # A write to a full disk may be partial; the rest follows once there is space.
            self._buffer = self._buffer[self._file.write(self._buffer) :]


def read_metrics(path: Path) -> list[dict[str, Value]]:
    """Read the rows of a metrics file, one per step, sorted by step.

    A step logged again after a resume keeps the row of the latest attempt; rows of one step and attempt are merged. A
    torn last line is ignored, so that a running run can be read; any other invalid line raises UserError.
    """
    if not path.exists():
        return []
    rows: dict[int, dict[str, Value]] = {}
    lines = [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line]
    for number, line in lines:
        row = _parse(line)
        if row is not None:
            _merge(rows, row)
        elif number < lines[-1][0]:
            raise UserError(f"{path}, line {number}: not a row of metrics. Remove that line; the others are kept.")
    return [rows[step] for step in sorted(rows)]


def read_all_rows(path: Path) -> Iterator[dict[str, Value]]:
    """Rows as they were written, also of steps that a later attempt trained again; damaged lines are left out."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    yield from (row for line in lines if (row := _parse(line)) is not None)


def read_last_values(path: Path) -> dict[str, Value]:
    """Latest value of every key, read from the end of the file alone."""
    try:
        with path.open("rb") as file:
            lines = _last_lines(file)
    except FileNotFoundError:
        return {}
    values: dict[str, Value] = {}
    for line in lines:
        row = _parse(line)  # None if reading began within a line
        values |= {} if row is None else {key: value for key, value in row.items() if value is not None}
    return values


def _last_lines(file: BinaryIO) -> list[bytes]:
    """At least the last `TAIL_ROWS` lines, if there are as many; the first may be torn."""
    size, length = file.seek(0, os.SEEK_END), TAIL_BYTES
    while True:
        file.seek(max(0, size - length))
        lines = file.read().split(b"\n")
        if len(lines) > TAIL_ROWS or length >= size:
            return lines
        length *= 4


def decode(row: Mapping[str, Any]) -> dict[str, Value]:
    """Convert the strings of non-finite numbers back to floats."""
    return {key: float(value) if isinstance(value, str) else value for key, value in row.items()}


def repair(path: Path) -> None:
    """Truncate a last line torn by a crash; a complete last line without a newline is terminated."""
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


def _merge(rows: dict[int, dict[str, Value]], row: dict[str, Value]) -> None:
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


def _encode(value: Value | Sequence[int]) -> Value | Sequence[int] | str:
    if value is None or isinstance(value, Sequence) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
