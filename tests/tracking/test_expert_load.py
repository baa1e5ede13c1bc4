"""Record of expert load: thinned by step alone, so that a run that was killed writes the same rows."""

from itertools import pairwise
from pathlib import Path

import pytest

from titan_exp.tracking.run_folder.metrics_jsonl import (
    ROWS,
    TAIL_BYTES,
    ExpertLoadLog,
    JsonlSink,
    MetricRows,
    layer_counts,
    read_last_values,
    read_metrics,
)


def logged(path: Path, steps: int, every: int, *, first: int = 1, attempt: int = 1) -> MetricRows:
    log = ExpertLoadLog(path, attempt, steps=steps, log_every=every)
    for step in range(first, steps + 1):
        if step % every == 0 or step == steps:
            log.log(step, {"layer_0": [step, 0]})
    log.close("done")
    return read_metrics(path)


@pytest.mark.parametrize(("steps", "every"), [(20, 1), (1000, 10), (100_000, 10), (100_001, 1000)])
def test_a_record_has_rows_at_even_steps_and_the_last(tmp_path: Path, steps: int, every: int):
    rows = logged(tmp_path / "load.jsonl", steps, every)
    found = [row["step"] for row in rows]
    assert len(found) <= ROWS + 1
    assert len(found) >= min(ROWS // 2, steps // every)
    assert found[-1] == steps
    assert len({after - before for before, after in pairwise(found[:-1])}) == 1
    assert layer_counts(rows[0]) == {"layer_0": [found[0], 0]}


def test_a_resumed_run_has_the_same_rows(tmp_path: Path):
    whole = logged(tmp_path / "whole.jsonl", 1000, 1)
    (tmp_path / "killed.jsonl").write_bytes((tmp_path / "whole.jsonl").read_bytes()[:7000])
    killed = logged(tmp_path / "killed.jsonl", 1000, 1, first=101, attempt=2)
    assert [(row["step"], row["layer_0"]) for row in killed] == [(row["step"], row["layer_0"]) for row in whole]


def test_the_newest_values_are_found_in_long_rows(tmp_path: Path):
    """94 layers of experts make a row longer than what is read of the end of the file at first."""
    sink = JsonlSink(tmp_path / "metrics.jsonl", 1)
    layers = {
        f"experts/layer_{layer}/{name}": 1.234567 for layer in range(94) for name in ("load_max", "entropy", "dead")
    }
    for step in range(1, 40):
        sink.log(
            {"step": step, "loss": 1 / step, **layers, **({"validation_loss": 0.5} if step == 35 else {}), **layers}
        )
    sink.close("done")
    assert (tmp_path / "metrics.jsonl").stat().st_size / 39 > TAIL_BYTES / 2
    values = read_last_values(tmp_path / "metrics.jsonl")
    assert (values["step"], values["loss"], values["validation_loss"]) == (39, 1 / 39, 0.5)
