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
from titan_exp.config.paths.foreign_file import FILE_BYTES, LARGEST, LINE_BYTES, open_file, parse_json, read_lines
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.metric_rows import MetricRows
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


def read_metrics(path: Path) -> MetricRows:
    """Read the rows of a metrics file, one per step, sorted by step.

    A step logged again after a resume keeps the row of the latest attempt; rows of one step and attempt are merged. A
    torn last line is ignored, so that a running run can be read; any other invalid line raises UserError.
    """
    rows, damaged = MetricRows(), 0
    for number, line in enumerate(_lines(path), 1):
        if damaged and line:
            raise UserError(f"{path}, line {damaged}: not a row of metrics. Remove that line; the others are kept.")
        row = parse_row(line)
        if row is not None:
            rows.merge(row)
        elif line:
            damaged = number
    return rows.in_order()


def read_all_rows(path: Path) -> Iterator[dict[str, Value]]:
    """Rows as they were written, also of steps that a later attempt trained again; damaged lines are left out."""
    yield from (row for line in _lines(path) if (row := parse_row(line)) is not None)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        yield from read_lines(path)
    except FileNotFoundError:
        return


def read_last_values(path: Path) -> dict[str, Value]:
    """Latest value of every key, read from the end of the file alone. Raises UserError if it cannot be read."""
    try:
        with open_file(path) as file:
            lines = _last_lines(file)
    except FileNotFoundError:
        return {}
    values: dict[str, Value] = {}
    for line in lines:
        row = parse_row(line)  # None if reading began within a line
        values |= {} if row is None else {key: value for key, value in row.items() if value is not None}
    return values


def _last_lines(file: BinaryIO) -> list[bytes]:
    """At least the last `TAIL_ROWS` lines, if there are as many; the first may be torn."""
    size, length = file.seek(0, os.SEEK_END), TAIL_BYTES
    while True:
        file.seek(max(0, size - length))
        lines = file.read().split(b"\n")
        if len(lines) > TAIL_ROWS or length >= min(size, FILE_BYTES):
            return lines
        length *= 4


def decode(row: Mapping[str, Any]) -> dict[str, Value]:
    """Convert the strings of non-finite numbers back to floats."""
    return {key: float(value) if isinstance(value, str) else value for key, value in row.items()}


def repair(path: Path) -> None:
    """Truncate a last line torn by a crash; a complete last line without a newline is terminated. Raises UserError if
    it is longer than `LINE_BYTES`."""
    try:
        with open_file(path) as file:
            size, length, text = file.seek(0, os.SEEK_END), TAIL_BYTES, b""
            while b"\n" not in text and len(text) < size:
                if length > LINE_BYTES:
                    raise UserError(f"{path}: its last line is longer than {LINE_BYTES // 2**20} MiB. Remove it.")
                file.seek(max(0, size - length))
                text, length = file.read(), length * 4
    except FileNotFoundError:
        return
    torn = text[text.rfind(b"\n") + 1 :]
    if torn and parse_row(torn) is None:
        os.truncate(path, size - len(torn))
    elif torn:
        with path.open("ab") as whole:
            whole.write(b"\n")


def parse_row(line: bytes) -> dict[str, Value] | None:
    """Row of a line; None if it is damaged."""
    try:
        row = parse_json(line, dict)
    except ValueError:
        return None
    step = row.get("step")
    if type(step) is not int or not 0 <= step <= LARGEST or not all(map(_is_value, row.values())):
        return None
    return decode(row)


def _is_value(value: object) -> bool:
    if type(value) is float or value is None:
        return True
    if isinstance(value, list):  # of numbers, in the record of expert load
        return all(type(item) in (int, float) for item in value)
    if isinstance(value, str):
        return value in ("NaN", "Infinity", "-Infinity")
    return type(value) is int and abs(value) < 2**63


def _encode(value: Value | Sequence[int]) -> Value | Sequence[int] | str:
    if value is None or isinstance(value, Sequence) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
