import logging

import pytest

from titan_exp.tracking.run_folder.metrics_jsonl import Row
from titan_exp.tracking.sinks import BestEffortSink


class Recorder:
    def __init__(self, fail_at: int | None = None) -> None:
        self.rows: list[Row] = []
        self.fail_at = fail_at
        self.closed: list[str] = []

    def log(self, row: Row) -> None:
        if row["step"] == self.fail_at:
            raise ConnectionError("server is gone\nlong story")
        self.rows.append(row)

    def close(self, state: str) -> None:
        self.closed.append(state)


def test_rows_and_close_are_forwarded() -> None:
    recorder = Recorder()
    mirror = BestEffortSink("W&B", "tracking.wandb", lambda: recorder)
    mirror.log({"step": 1})
    mirror.close("done")
    mirror.close("failed")
    assert recorder.rows == [{"step": 1}]
    assert recorder.closed == ["done"]


def test_failure_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(fail_at=2)
    mirror = BestEffortSink("W&B", "tracking.wandb", lambda: recorder)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            mirror.log({"step": step})
        mirror.close("done")
    assert recorder.rows == [{"step": 1}]
    [warning] = caplog.messages
    assert "ConnectionError: server is gone)" in warning
    assert "tracking.wandb=false" in warning


def test_failed_start_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    def start() -> Recorder:
        raise ImportError("no such library")

    mirror = BestEffortSink("TensorBoard", "tracking.tensorboard", start)
    mirror.log({"step": 1})
    mirror.close("done")
    assert len(caplog.messages) == 1


def test_keyboard_interrupt_is_not_swallowed() -> None:
    def start() -> Recorder:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        BestEffortSink("W&B", "tracking.wandb", start)
