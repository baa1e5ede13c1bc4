"""Rows by column are the same rows, in a tenth of the memory."""

import json
import math
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from titan_exp.tracking.run_folder.metrics_jsonl import MetricRows, column_of, read_metrics
from titan_exp.tracking.run_folder.run import Lineage, read_history


def by_dictionaries(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per step: a later attempt replaces it, and the same completes it."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        known = found.get(row["step"])
        if known is None or (row.get("attempt") or 0) > (known.get("attempt") or 0):
            found[row["step"]] = dict(row)
        elif (row.get("attempt") or 0) == (known.get("attempt") or 0):
            known.update(row)
    return [found[step] for step in sorted(found)]


def drawn(draw: random.Random) -> list[dict[str, Any]]:
    """Rows of several attempts, some of which log other steps and keys than those before."""
    values = [None, 1, 0, -3, 2**53 + 1, 2**62 + 3, 1.5, -0.0, math.inf, 1e-300, [3, 4]]
    rows, step = [], 0
    for attempt in range(1, draw.randrange(2, 5)):
        step = draw.randrange(step + 1)
        every = draw.choice([1, 2, 3])
        for _ in range(draw.randrange(9)):
            step += every
            keys = draw.sample(["a", "b", "c", "tokens"], draw.randrange(5))
            row = {"step": step, **{key: draw.choice(values) for key in keys}, "attempt": attempt}
            rows += (
                [row] if draw.random() < 0.7 else [row, {"step": step, "b": draw.choice(values), "attempt": attempt}]
            )
            if draw.random() < 0.1:
                rows.append({"step": draw.randrange(step + 1), "a": 7, "attempt": draw.randrange(attempt + 1)})
    return rows


@pytest.mark.parametrize("seed", range(200))
def test_rows_are_those_of_dictionaries(seed: int):
    rows = drawn(random.Random(seed))
    made = MetricRows()
    for row in rows:
        made.merge(row)
    made, expected = made.in_order(), by_dictionaries(rows)
    assert list(made) == expected
    assert [[type(value) for value in row.values()] for row in made] == [
        [type(row[key]) for key in one] for one, row in zip(made, expected, strict=True)
    ]
    assert made == expected
    assert made[-2:] == expected[-2:]
    for key in ("step", "a", "tokens", "nothing"):
        assert list(column_of(made, key)) == list(column_of(expected, key)) == [row.get(key) for row in expected]
    known = [
        (float(row["step"]), float(row["b"]))
        for row in expected
        if 1 < row["step"] <= 12 and row.get("b") is not None and not isinstance(row["b"], list)
    ]
    steps, values = made.series("b", "step", above=1, up_to=12)
    assert [pair for pair in zip(steps, values, strict=True) if not math.isnan(pair[1])] == known


def test_a_row_takes_some_hundred_bytes(tmp_path: Path):
    count, metrics = 20_000, [f"metric_{number}" for number in range(25)]
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for step in range(1, count + 1):
            file.write(json.dumps({"step": step, **dict.fromkeys(metrics, step / 3), "attempt": 1}) + "\n")
    (tmp_path / "child").mkdir()
    tracemalloc.start()
    rows = read_metrics(path)
    before, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == count
    assert before < 400 * count  # dictionaries: 2,200
    assert peak < 500 * count


def test_a_history_is_its_parents_rows_up_to_its_beginning(tmp_path: Path):
    for name, steps in (("a", range(1, 9)), ("b", range(5, 12))):
        (tmp_path / "x" / name).mkdir(parents=True)
        rows = [json.dumps({"step": step, "of": step if name == "a" else -step}) + "\n" for step in steps]
        (tmp_path / "x" / name / "metrics.jsonl").write_text("".join(rows))
    Lineage(str(tmp_path / "x" / "a"), 4, 400).write(tmp_path / "x" / "b")
    assert list(read_history(tmp_path / "x" / "b").column("of")) == [1, 2, 3, 4, -5, -6, -7, -8, -9, -10, -11]
