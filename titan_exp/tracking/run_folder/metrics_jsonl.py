"""Metrics: the interface of sinks; metrics.jsonl, the primary record, with one JSON line per logged step, readable
after any crash; and the expert load in `expert_load.jsonl`.

JSON has no NaN: non-finite numbers are written as the strings "NaN", "Infinity" and "-Infinity", as in protobuf's JSON
mapping, and null means unknown. `float(x)` in Python and `Number(x)` in JavaScript read all of them.

A row of the record is `{"step": 10, "layer_0": [tokens of expert 0, 1, ...], ..., "attempt": 1}`, as in metrics.jsonl.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, TypeVar, overload, runtime_checkable

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import FILE_BYTES, LARGEST, LINE_BYTES, open_file, parse_json, read_lines
from titan_exp.tracking.logging import get_logger

if TYPE_CHECKING:
    import numpy as np

Value = float | int | None  # a number, or None if unknown
Row = Mapping[str, Value]
"""Metrics of one logged step, with the same keys in every sink. Models, objectives and optimizers may add any others.

| key | meaning |
|---|---|
| `step`, `tokens`, `attempt` | optimizer steps and tokens of the whole job so far; number of the attempt |
| `loss` | mean over the tokens of the step's global batch, in nats per token |
| `grad_norm`, `lr` | global gradient norm before clipping; learning rate of the step |
| `clip/share`, `clip/factor` | share of numbers clamped or of parameters scaled; smallest factor (`grad_clip`) |
| `clip/norm/NAME` | norm of the group's gradients, before its `max_grad_norm` |
| `tokens_per_second`, `tokens_per_second_per_device` | throughput since the previous row, without evaluation, saves |
| `tflops`, `mfu` | model TFLOP/s per device; its fraction of the dense bf16 peak, from 0 to 1 |
| `memory`, `memory_reserved` | peak GiB of a rank in this attempt: allocated (resident set on CPU), reserved |
| `validation_loss`, `validation_perplexity`, `validation_tokens` | over the whole validation split, when evaluated |
| `validation_bits_per_byte` | the same in bits per byte of text, where the tokenizer says how long its tokens are |
| `validation_loss/NAME`, `validation_bits_per_byte/NAME` | per source of a mixture, and per set of `evaluation.sets` |
| `averaged/validation_loss`, `averaged/validation_loss/NAME` | the same with the averaged weights (`weight_average`) |
| `objective/NAME`, `model/NAME`, `optimizer/NAME` | reported metrics, reduced over all ranks |
| `experts/load_max` | tokens of the busiest expert over the mean, of the worst layer |
| `experts/entropy` | entropy of the load, mean over layers; 1 is balanced |
| `experts/dead` | experts without a token in the global batch, sum over layers |
| `experts/bias_range` | max − min of the router biases, largest of the layers |
| `experts/balance_loss`, `experts/z_loss` | sum over layers, with their factors; `loss` is without them |
| `experts/layer_3/NAME` | the same of one layer |
| `epoch`, `epoch/NAME` | passes over the training documents so far; per source of a mixture |
"""

REPORTED = ("objective/", "model/", "optimizer/", "averaged/")
"""Prefixes of metrics that the objective, the model or the optimizer reports, and of averaged weights' metrics."""


class Sink(Protocol):
    """Receives rows on rank 0 or in the launching process."""

    def log(self, row: Row) -> None:
        """Record the row of one step."""
        ...

    def close(self, state: str) -> None:
        """Finish with the run's final state: `done`, `failed` or `preempted`."""
        ...


@runtime_checkable
class LateSink(Protocol):
    """A sink that also takes rows of earlier steps."""

    def late(self, axis: str, row: Row) -> None:
        """Record values that became known after rows of later steps. The key `axis` has their step, and is their step
        axis where steps must ascend."""
        ...


@runtime_checkable
class ImageSink(Protocol):
    """A sink that also takes images."""

    def image(self, name: str, step: int, image: np.ndarray) -> None:
        """Record an image [height, width, 3] in uint8 of a step."""
        ...


_ABSENT, _NULL, _INTEGER, _FLOAT, _OTHER = range(5)
"""Kinds of cells. `_OTHER` is for integers that no float represents, and for lists in the record of expert load."""


class _Column:
    def __init__(self) -> None:
        self.numbers, self.kinds = array("d"), bytearray()
        self.others: dict[int, Any] = {}

    def put(self, place: int, value: Any) -> None:
        if isinstance(value, float):
            number, kind = value, _FLOAT
        elif value is None:
            number, kind = 0.0, _NULL
        else:
            number = float(value) if isinstance(value, int) else math.nan
            kind = _INTEGER if number == value else _OTHER
            if kind == _OTHER:
                self.others[place] = value
        if (missing := place - len(self.kinds)) < 0:
            self.numbers[place], self.kinds[place] = number, kind
            return
        if missing:
            self.numbers.frombytes(bytes(8 * missing))
            self.kinds.extend(bytes(missing))
        self.numbers.append(number)
        self.kinds.append(kind)

    def get(self, place: int) -> Any:
        kind = self.kinds[place] if place < len(self.kinds) else _ABSENT
        if kind <= _NULL:
            return None
        number = self.numbers[place]
        return number if kind == _FLOAT else int(number) if kind == _INTEGER else self.others[place]


class MetricRows(Sequence[dict[str, Any]]):
    """Rows of metrics, one per step, ascending. An item becomes a dictionary when it is accessed."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._steps = array("q")
        self._columns: dict[str, _Column] = {}
        self._late: dict[int, dict[str, Any]] = {}
        """Rows of steps that a later attempt logged between steps of an earlier one."""
        for row in rows:
            self.append(row)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row after all others, whatever its step."""
        self._steps.append(row["step"])
        self._put(len(self._steps) - 1, row)

    def merge(self, row: dict[str, Any]) -> None:
        """Add a row of any step. A later attempt's row replaces a known one; one of the same attempt completes it."""
        step = row["step"]
        if not self._steps or step > self._steps[-1]:
            self.append(row)
            return
        place = bisect_left(self._steps, step)
        there = self._steps[place] == step
        attempts = self._columns.get("attempt", _Column())
        attempt = (attempts.get(place) if there else self._late.get(step, row).get("attempt")) or 0
        later = (row.get("attempt") or 0) - attempt
        if later < 0:
            return
        if not there:
            self._late[step] = row if later else {**self._late.get(step, {}), **row}
            return
        for column in self._columns.values() if later else ():
            if place < len(column.kinds):
                column.kinds[place] = _ABSENT
        self._put(place, row)

    def in_order(self) -> MetricRows:
        """Return these rows sorted by step."""
        if not self._late:
            return self
        return MetricRows(sorted([*self, *self._late.values()], key=lambda row: row["step"]))

    def column(self, key: str) -> Iterator[Any]:
        """Value of a key in every row; None where it is unknown."""
        column = self._columns.get(key, _Column())
        return map(column.get, range(len(self)))

    def series(self, key: str, over: str, *, above: float, up_to: float) -> tuple[list[float], list[float]]:
        """Known values of `over`, above `above` and up to `up_to`, and the values of `key` in the same rows."""
        import numpy as np

        kept, numbers = np.ones(len(self), dtype=bool), []
        for name in (over, key):
            column = self._columns.get(name, _Column())
            kinds, short = np.frombuffer(column.kinds, np.uint8), len(self) - len(column.kinds)
            kept &= np.pad(kinds, (0, short)) >= _INTEGER
            numbers.append(np.pad(np.frombuffer(column.numbers, np.float64), (0, short)))
        kept &= (numbers[0] > above) & (numbers[0] <= up_to)
        return numbers[0][kept].tolist(), numbers[1][kept].tolist()

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self._row(place) for place in range(*index.indices(len(self)))]
        return self._row(range(len(self))[index])

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def _row(self, place: int) -> dict[str, Any]:
        present = (pair for pair in self._columns.items() if place < len(pair[1].kinds) and pair[1].kinds[place])
        return {key: column.get(place) for key, column in present}

    def _put(self, place: int, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            column = self._columns.get(key)
            if column is None:
                column = self._columns[key] = _Column()
            column.put(place, value)


def column_of(rows: Sequence[Mapping[str, Value]], key: str) -> Iterator[Value]:
    """Value of a key in every row; None where it is unknown."""
    return rows.column(key) if isinstance(rows, MetricRows) else (row.get(key) for row in rows)


Item = TypeVar("Item")


def final_value(rows: Sequence[Mapping[str, Value]], name: str) -> float | None:
    """Last value of a metric. For the training loss, the mean over the last 2 % of its rows, since a single batch is
    noisy. NaN if it is not finite, None if it was never logged."""
    values = [float(value) for value in column_of(rows, name) if value is not None]
    if name != "loss":
        return values[-1] if values else None
    return tail_mean(values)


def tail_mean(values: list[float]) -> float | None:
    """Mean of the last 2 % of the values; NaN if one of them is not finite, None without values."""
    tail = last_fiftieth(values)
    return math.fsum(tail) / len(tail) if tail and all(map(math.isfinite, tail)) else math.nan if tail else None


def last_fiftieth(rows: list[Item]) -> list[Item]:
    """Last 2 % of the items, at least one."""
    return rows[-max(1, len(rows) // 50) :]


TAIL_BYTES = 16384
"""Bytes read from the end of the file for the newest rows. They hold dozens of rows, unless a row has many metrics."""

TAIL_ROWS = 8  # minimum number of rows that are read, if the file has as many


class JsonlSink:
    """Appends rows to `path`; a line torn by an earlier crash is removed first. Writes are unbuffered, so rows survive
    a killed process. On a full disk, rows are kept in memory, the error is logged, and the next row retries; `close`
    raises if rows are left."""

    def __init__(self, path: Path, attempt: int, clock: Callable[[], float] | None = None) -> None:
        """`clock` gives the Unix time of a row; without it, rows have no time."""
        repair(path)
        self._path, self._attempt, self._clock = path, attempt, clock
        self._file = path.open("ab", buffering=0)
        self._buffer, self._failed = b"", False

    def log(self, row: Mapping[str, Value | Sequence[int]]) -> None:
        """Write the row, adding its time, and this attempt's number if it has none."""
        encoded = {key: _encode(value) for key, value in row.items()}
        encoded.setdefault("attempt", self._attempt)
        if self._clock is not None:
            encoded["time"] = round(self._clock(), 3)
        self._buffer += json.dumps(encoded, allow_nan=False).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not self._failed:
                text = (
                    "cannot write %s (%s). Training continues and keeps the rows in memory until it can write them. %s"
                )
                lost = "They are lost if somebody kills the run before."
                get_logger().error(text, self._path, error.strerror or error, lost)
            self._failed = True
            return
        if self._failed:
            self._failed = False
            get_logger().info("%s is writable again, and no row is missing", self._path)

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
    """Read the rows of a metrics file, one per step, sorted by step. A step logged again after a resume keeps the row
    of the latest attempt; rows of one step and attempt are merged. A torn last line is ignored, so that a running run
    can be read; any other invalid line raises UserError."""
    rows, damaged = MetricRows(), 0
    for number, line in enumerate(_lines(path), 1):
        if damaged and line:
            remedy = "Remove the line and keep the others."
            raise UserError(f"{path}, line {damaged}: this is not a row of metrics. {remedy}")
        row = parse_row(line)
        if row is not None:
            rows.merge(row)
        elif line:
            damaged = number
    return rows.in_order()


def read_all_rows(path: Path) -> Iterator[dict[str, Value]]:
    """Rows as they were written, including steps that a later attempt trained again; damaged lines are left out."""
    yield from (row for line in _lines(path) if (row := parse_row(line)) is not None)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        yield from read_lines(path)
    except FileNotFoundError:
        return


def read_last_values(path: Path) -> dict[str, Value]:
    """Latest value of every key, read only from the end of the file. Raises UserError if it cannot be read."""
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
    """At least the last `TAIL_ROWS` lines, if there are as many; the first of them may be torn."""
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
    """Repair the end of a file: truncate a last line torn by a crash, and terminate a complete one. Raises UserError if
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


def rows_of(lines: Iterable[str], attempt: int) -> Iterator[dict[str, Value]]:
    """Parse metric rows of one attempt; other lines are skipped."""
    for line in lines:
        row = parse_row(line.encode())
        if row is not None and row.get("attempt") == attempt:
            yield row


def _is_value(value: object) -> bool:
    if type(value) is float or value is None:
        return True
    if isinstance(value, list):  # a list of numbers, in the record of expert load
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


ROWS = 500
"""Approximate number of rows in a run's record; a picture shows no more, and 94 layers of 128 experts take 70 kB a
row."""


class LoadStatistics(NamedTuple):
    """Balance of one layer's tokens over its experts."""

    load_max: float  # tokens of the busiest expert over the mean; 1 is balanced
    dead: int  # experts without a token
    entropy: float  # −Σ p ln p / ln(experts), p the share of tokens: 1 is balanced, 0 is all tokens on one expert


def load_statistics(counts: Sequence[int]) -> LoadStatistics:
    """Statistics of a layer's tokens per expert."""
    total = sum(counts)
    if not total:
        return LoadStatistics(0.0, len(counts), 0.0)
    shares = [count / total for count in counts if count]
    # Six digits suffice: a row has three such numbers for each of up to a hundred layers.
    entropy = abs(math.fsum(share * math.log(share) for share in shares)) / math.log(len(counts))
    load_max = float(f"{max(counts) * len(counts) / total:.6g}")
    return LoadStatistics(load_max, len(counts) - len(shares), float(f"{entropy:.6g}"))


class ExpertLoadLog:
    """Appends token counts to the record, at steps that depend only on the run's length."""

    def __init__(self, path: Path, attempt: int, *, steps: int, log_every: int) -> None:
        self._sink = JsonlSink(path, attempt)
        self._steps = steps
        self._every = log_every * math.ceil(steps / (log_every * ROWS))

    def log(self, step: int, counts: Mapping[str, Sequence[int]]) -> None:
        """Write the counts of a step, by layer, if the step is due."""
        if step % self._every == 0 or step == self._steps:
            self._sink.log({"step": step, **counts})

    def close(self, state: str) -> None:
        """Close the file. Raises OSError if rows could not be written."""
        self._sink.close(state)


def layer_counts(row: Mapping[str, Any]) -> dict[str, list[int]]:
    """Token counts of a row of the record, by layer."""
    return {key: value for key, value in row.items() if isinstance(value, list)}
