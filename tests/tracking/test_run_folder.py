"""The run folder: atomic files, one row per start, one lock holder at a time."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.run_folder import LockedError, RunFolder, RunState, write_atomically

HOLD = """
import sys
from titan_exp.tracking.run_folder.run_folder import RunFolder
folder = RunFolder(sys.argv[1])
lock = folder.claim("launcher") if sys.argv[2] == "launcher" else folder.join(int(sys.argv[2]))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(path: Path, who: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run lock inside the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), who], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    write_atomically(target, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(target, "new \ud800")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_state_is_read_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_state() is None
    state = RunState("failed", 12, 5.5, 2, "rank 1: ValueError")
    folder.write_state(state)
    assert folder.read_state() == state


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"state": "done"}', '{"state": "odd", "step": 1, "time": 1.0, "attempt": 1, "reason": null}'],
)
def test_edited_state_is_refused(tmp_path: Path, text: str) -> None:
    folder = RunFolder(tmp_path)
    folder.state.write_text(text)
    with pytest.raises(UserError, match=r"state\.json"):
        folder.read_state()


def test_heartbeats_closer_than_a_second_are_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_heartbeat() is None
    assert folder.beat(1)
    assert not folder.beat(2)
    beat = folder.read_heartbeat()
    assert beat is not None
    assert beat.step == 1
    folder.beat(3, force=True)
    beat = folder.read_heartbeat()
    assert beat is not None
    assert beat.step == 3
    assert json.loads(folder.heartbeat.read_text()).keys() == {"step", "time", "warning"}


def test_the_first_reason_to_stop_is_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not folder.stop_requested()
    assert folder.stop_reason() is None
    folder.request_stop("Ctrl-C")
    folder.request_stop("SIGTERM")
    assert folder.stop_requested()
    assert folder.stop_reason() == "Ctrl-C"
    folder.clear_stop()
    folder.clear_stop()
    assert not folder.stop_requested()


def test_one_row_per_start_filled_in_later(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_attempts() == []
    first = folder.add_attempt(world_size=2, hosts=["a", "b"])
    assert (first.attempt, first.start, first.exit) == (1, None, None)
    folder.update_attempt(1, job_id="77", start=1.0)
    folder.add_attempt(world_size=4, hosts=["a"])
    folder.update_attempt(1, end=2.0, exit=1, reason="rank 1: ValueError")
    rows = folder.read_attempts()
    assert [row.attempt for row in rows] == [1, 2]
    assert (rows[0].job_id, rows[0].hosts, rows[0].end, rows[0].exit) == ("77", ("a", "b"), 2.0, 1)
    assert len(folder.attempts.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "damaged",
    ["{}", "", "[" * 100_000, '{"attempt": 2, "intent": 9}', "\0" * 50],
    ids=["object", "empty", "nested", "type", "zeros"],
)
def test_a_damaged_line_is_an_attempt_that_names_it(tmp_path: Path, damaged: str) -> None:
    folder = RunFolder(tmp_path)
    first = folder.add_attempt(world_size=1, hosts=["a"])
    with folder.attempts.open("a") as file:
        file.write(damaged.replace("}", ', "hosts": 7}') + "\n")
    rows = folder.read_attempts()
    assert [row.attempt for row in rows] == [1, 2]
    assert rows[0] == first
    assert rows[1].reason == "line 2 of attempts.jsonl is damaged"
    assert rows[1].end is not None
    assert folder.add_attempt(world_size=1, hosts=["a"]).attempt == 3
    assert folder.read_attempts()[:2] == rows


def test_every_flipped_bit_of_an_attempt_leaves_the_others_and_its_job(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.add_attempt(world_size=2, hosts=["a"], job_id="11", launched_by="slurm", token="t1")
    folder.add_attempt(world_size=2, hosts=["b"], job_id="22", launched_by="slurm", token="t2")
    whole, rows = folder.attempts.read_bytes(), folder.read_attempts()
    begin = whole.index(b"\n") + 1
    known = named = 0
    for bit in range(8 * begin, 8 * (len(whole) - 1)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        folder.attempts.write_bytes(flipped)
        found = folder.read_attempts()
        assert found[0] == rows[0]
        assert found[-1].attempt >= 2
        # One bit is in one field: the job can still be asked for, by its id or its token.
        known += (found[-1].job_id, found[-1].token) != (None, None)
        named += found[-1].reason == "line 2 of attempts.jsonl is damaged"
    assert known == 8 * (len(whole) - 1) - 8 * begin
    assert named > known / 2  # the others are flips within a text


def _add_some(path: Path, count: int) -> None:
    folder = RunFolder(path)
    for _ in range(count):
        number = folder.add_attempt(world_size=1, hosts=["a"]).attempt
        folder.update_attempt(number, exit=number)


def test_processes_that_write_rows_at_once_lose_none(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_add_some, args=(tmp_path, 10)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    rows = RunFolder(tmp_path).read_attempts()
    assert [row.attempt for row in rows] == list(range(1, 31))
    assert all(row.exit == row.attempt for row in rows)


def test_a_claimed_folder_is_refused_and_free_after_a_kill(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with holding(tmp_path, "launcher") as process:
        with pytest.raises(LockedError) as caught:
            folder.claim("launcher", timeout=0.0)
        assert caught.value.holder is not None
        assert (caught.value.holder.pid, caught.value.holder.role) == (process.pid, "launcher")
        assert folder.holder() == caught.value.holder
        os.kill(process.pid, signal.SIGKILL)
        with folder.claim("launcher", timeout=10.0):
            pass
    assert folder.holder() is None


def test_ranks_hold_the_folder_together_and_outlive_the_claim(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not folder.ranks_alive()
    with holding(tmp_path, "0") as rank_0, holding(tmp_path, "1"):
        with folder.claim("launcher"):
            assert folder.ranks_alive()
        holder = folder.holder()
        assert holder is not None
        assert (holder.pid, holder.role) == (rank_0.pid, "rank 0")
    deadline = time.monotonic() + 10
    while folder.ranks_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not folder.ranks_alive()


def test_query_of_the_holder_is_not_a_holder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.claim("launcher"):
        pass
    assert folder.holder() is None
    with folder.claim("launcher", timeout=0.0):
        assert folder.holder() is not None
