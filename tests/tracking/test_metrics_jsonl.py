import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import NO_MOUNTS, can_mount, fill, small_disk
from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.metrics_jsonl import TAIL_BYTES, JsonlSink, read_last_values, read_metrics, repair


def write(path: Path, *rows: dict, attempt: int = 1) -> None:
    sink = JsonlSink(path, attempt)
    for row in rows:
        sink.log(row)
    sink.close("done")


def test_row_is_flushed_by_log(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", 1, lambda: 1.2345)
    sink.log({"step": 1, "loss": 2.5, "mfu": None})
    line = '{"step": 1, "loss": 2.5, "mfu": null, "attempt": 1, "time": 1.234}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == line
    sink.close("done")
    sink.close("done")  # a second time does nothing


def test_rows_read_back_bitwise(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    loss = 1 / 3 * 1e-7
    write(path, {"step": 1, "tokens": 2**60 + 1, "loss": loss, "mfu": None, "attempt": 4})
    assert read_metrics(path) == [{"step": 1, "tokens": 2**60 + 1, "loss": loss, "mfu": None, "attempt": 4}]


def test_no_file_is_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_numbers_that_are_not_finite_are_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse)["loss"] == "NaN"
    [row] = read_metrics(path)
    assert isinstance(row["loss"], float)
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["lr"]) == (math.inf, -math.inf)


def test_the_highest_attempt_is_kept_for_each_step_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, *({"step": step, "loss": 1.0} for step in (10, 20, 30)), attempt=1)
    write(path, *({"step": step, "loss": 2.0} for step in (20, 30, 40)), attempt=2)
    write(path, {"step": 25, "loss": 3.0}, {"step": 30, "loss": 3.0}, attempt=10)
    found = [(row["step"], row["loss"], row["attempt"]) for row in read_metrics(path)]
    assert found == [(10, 1.0, 1), (20, 2.0, 2), (25, 3.0, 10), (30, 3.0, 10), (40, 2.0, 2)]


def test_older_attempt_written_later_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "loss": 2.0, "attempt": 2}, {"step": 1, "loss": 1.0, "attempt": 1})
    assert [row["loss"] for row in read_metrics(path)] == [2.0]


def test_rows_of_one_step_and_attempt_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "loss": 2.0}, {"step": 1, "validation_loss": 3.0})
    assert read_metrics(path) == [{"step": 1, "loss": 2.0, "validation_loss": 3.0, "attempt": 1}]


WHOLE = b'{"step": 1, "loss": 2.0, "attempt": 1}\n{"step": 2, "loss": 1.5, "attempt": 1}\n'


@pytest.mark.parametrize("length", range(len(WHOLE) + 1))
def test_a_file_torn_anywhere_is_read_and_repaired(tmp_path: Path, length: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE[:length])
    steps = [row["step"] for row in read_metrics(path)]
    # A row counts from its closing brace on, whether or not the line was ended.
    complete = [WHOLE.index(b"}") + 1, len(WHOLE) - 1]
    assert steps == [1, 2][: sum(length >= end for end in complete)]

    write(path, {"step": 3, "loss": 1.0}, attempt=2)
    assert [row["step"] for row in read_metrics(path)] == [*steps, 3]
    assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())


def test_zeros_after_a_power_failure_are_truncated(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(WHOLE + b"\0" * 100)
    assert len(read_metrics(path)) == 2
    repair(path)
    assert path.read_bytes() == WHOLE


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2"):
        read_metrics(path)


def test_killed_process_leaves_every_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from titan_exp.tracking.run_folder.metrics_jsonl import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1]), 1)\n"
        "for step in range(1, 51): sink.log({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_metrics(path)] == list(range(1, 51))


def test_buffered_rows_raise_at_close(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from titan_exp.tracking.run_folder.metrics_jsonl import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1]), 1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "for step in range(1, 101): sink.log({'step': step})\n"
        "sink.close('done')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=60, capture_output=True)
    assert done.stderr.count(b"keeps the rows in memory") == 1
    assert done.returncode == 1
    assert b"OSError" in done.stderr
    assert path.stat().st_size == 1000  # the last line is torn in its middle
    kept = [row["step"] for row in read_metrics(path)]
    assert kept == list(range(1, len(kept) + 1))
    write(path, {"step": 101}, attempt=2)
    assert [row["step"] for row in read_metrics(path)] == [*kept, 101]


@pytest.mark.skipif(not can_mount(), reason=NO_MOUNTS)
def test_no_row_is_missing_after_a_full_disk_has_room_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", 64 * 1024) as disk:
        path = disk / "metrics.jsonl"
        sink = JsonlSink(path, 1)
        sink.log({"step": 1})
        filler = fill(disk)
        for step in range(2, 1000):
            sink.log({"step": step})
        assert len(read_metrics(path)) < 999
        filler.unlink()
        sink.log({"step": 1000})
        assert [row["step"] for row in read_metrics(path)] == list(range(1, 1001))
        sink.close("done")
    assert caplog.text.count("No space left on device") == 1


def test_the_newest_values_come_from_the_end_alone(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    assert read_last_values(path) == {}
    rows = [{"step": step, "loss": 1.0 / step, "mfu": None, "attempt": 1} for step in range(1, 2001)]
    rows[-2]["validation_loss"] = 0.5
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 20')
    assert path.stat().st_size > 5 * TAIL_BYTES
    assert read_last_values(path) == {"step": 2000, "loss": 1.0 / 2000, "validation_loss": 0.5, "attempt": 1}
