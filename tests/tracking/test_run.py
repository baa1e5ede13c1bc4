"""Reader of a run folder: what it reads, how often, and when a run is lost."""

import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.run import Run
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState

CONFIG = "training:\n  steps: 7\n  batch_ramp: []\ncluster: {device: cpu}\n"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "x" / "0123456789ab")
    folder.path.mkdir(parents=True)
    folder.config.write_text(CONFIG)
    return folder


OPENED: list[str] = []


def note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        OPENED.append(os.path.basename(arguments[0]))


sys.addaudithook(note)


@pytest.fixture
def opened() -> list[str]:
    """Names of the files that were opened since, in order."""
    OPENED.clear()
    return OPENED


def start(folder: RunFolder, state: Any = "running", *, host: str = "", ago: float = 0.0) -> None:
    folder.add_attempt(world_size=1, hosts=(host or socket.gethostname(),))
    folder.update_attempt(1, start=time.time() - ago, intent=time.time() - ago)
    folder.write_state(RunState(state, 3, time.time() - ago, 1, None))


def test_each_file_is_read_once_when_it_is_asked_for(folder: RunFolder, opened: list[str]):
    start(folder)
    opened.clear()
    run = Run(folder)
    assert opened == []
    for _ in range(2):
        assert run.config["training"]["steps"] == 7
        assert (run.state.step if run.state else 0, run.status.state, len(run.attempts)) == (3, "lost", 1)
        assert (run.code, run.overrides, run.last_values, run.lineage) == (None, None, {}, None)
    files = {name: opened.count(name) for name in ("config.yaml", "state.json", "attempts.jsonl", "heartbeat")}
    assert files == dict.fromkeys(files, 1)


def test_a_damaged_file_spoils_no_other(folder: RunFolder):
    start(folder, "failed")
    folder.config.write_text("a: [")
    folder.env.write_text("[")
    run = Run(folder.path)
    assert (run.status.state, run.predicted.memory) == ("failed", None)
    for read in (lambda: run.config, lambda: run.environment):
        with pytest.raises(UserError):
            read()


@pytest.mark.parametrize(
    ("host", "ago", "beat", "state"),
    [("", 0.0, None, "lost"), ("", 90.0, 1.0, "lost"), ("far", 1.0, None, "running"), ("far", 90.0, None, "lost"),
     ("far", 90.0, 1.0, "running")],
)  # fmt: skip
def test_a_run_is_lost_if_nobody_holds_it_and_no_other_machine_gives_a_sign(
    folder: RunFolder, host: str, ago: float, beat: float | None, state: str
):
    start(folder, host=host, ago=ago)
    if beat is not None:
        folder.heartbeat.write_text(f'{{"step": 5, "time": {time.time() - beat}}}')
    found = Run(folder).status
    assert (found.state, found.step) == (state, 3 if beat is None else 5)
    assert ("died without a record" in (found.reason or "")) == (state == "lost")
    with folder.claim("launcher"):
        assert Run(folder).status.state == "running"


def test_a_deleted_state_is_that_of_the_last_attempt(folder: RunFolder):
    assert Run(folder).status.state == "new"
    start(folder)
    folder.update_attempt(1, end=time.time(), exit=85, reason="stopped")
    folder.state.unlink()
    assert (Run(folder).status.state, Run(folder).status.reason) == ("preempted", "stopped")
