import math
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan_exp.tracking.sinks import TensorBoardSink


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_known_values_are_read_back(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.log({"step": 10, "loss": 2.5, "mfu": None})
    sink.log({"step": 20, "loss": math.nan, "validation_loss": 1.5})
    sink.close("done")
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert sorted(accumulator.Tags()["scalars"]) == ["loss", "validation_loss"]
    (first, second) = scalars(tmp_path, "loss")
    assert first == (10, 2.5)
    assert second[0] == 20
    assert math.isnan(second[1])
    assert scalars(tmp_path, "validation_loss") == [(20, 1.5)]


def test_resume_purges_older_events(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for step in (10, 20, 30, 40):
        first.log({"step": step, "loss": 1.0})
    first.close("preempted")
    second = TensorBoardSink(tmp_path)
    for step in (30, 40, 50):
        second.log({"step": step, "loss": 2.0})
    second.close("done")
    assert scalars(tmp_path, "loss") == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0), (50, 2.0)]


def test_late_rows_purge_nothing(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.log({"step": 10, "loss": 2.5})
    sink.late("tasks/step", {"tasks/step": 5, "tasks/toy/acc": 0.5, "tasks/toy/none": None})
    sink.log({"step": 20, "loss": 1.5})
    sink.close("done")
    assert scalars(tmp_path, "tasks/toy/acc") == [(5, 0.5)]
    assert scalars(tmp_path, "loss") == [(10, 2.5), (20, 1.5)]


def test_no_rows_leave_no_files(tmp_path: Path) -> None:
    TensorBoardSink(tmp_path / "tensorboard").close("failed")
    assert not (tmp_path / "tensorboard").exists()
