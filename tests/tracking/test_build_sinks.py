import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.tracking.run_folder.metrics_jsonl import JsonlSink, read_metrics
from titan_exp.tracking.sinks import build_sinks


def build(folder: Path, *overrides: str, attempt: int = 1) -> list:
    return build_sinks(to_experiment(compose(["model=llama_debug", *overrides])), folder, "3f2a", attempt)


def test_metrics_jsonl_is_the_first_sink(tmp_path: Path) -> None:
    sinks = build(tmp_path, attempt=3)
    assert [type(sink) for sink in sinks] == [JsonlSink]
    sinks[0].log({"step": 1})
    sinks[0].close("done")
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row.pop("time") == pytest.approx(time.time(), abs=60)
    assert row == {"step": 1, "attempt": 3}


def test_tensorboard_is_in_the_run_folder(tmp_path: Path) -> None:
    sinks = build(tmp_path, "tracking=tensorboard")
    for sink in sinks:
        sink.log({"step": 1, "loss": 2.0})
        sink.close("done")
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [event.value for event in accumulator.Scalars("loss")] == [2.0]


def test_read_only_tensorboard_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    sinks = build(tmp_path, "tracking=tensorboard")
    for step in (1, 2):
        for sink in sinks:
            sink.log({"step": step, "loss": 2.0})
    for sink in sinks:
        sink.close("done")
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
