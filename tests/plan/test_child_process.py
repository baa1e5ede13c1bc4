"""Worker processes end with the command that started them, even when it is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from titan_exp.plan.planner_processes import PlannerProcesses


@pytest.mark.parametrize("alone", [True, False])
def test_workers_do_not_outlive_a_command_that_is_killed(alone: bool):
    words = [sys.executable, "-c", f"from tests.plan.test_child_process import command; command({alone})"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as began:
        assert began.stdout is not None
        worker = int(began.stdout.readline())
        assert _runs(worker)
        began.send_signal(signal.SIGKILL)
        began.wait(30)
    until = time.monotonic() + 30
    while _runs(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(worker)


def command(alone: bool) -> None:
    """Start a long-running worker and wait for it."""
    with PlannerProcesses(1, alone=alone) as pool:
        print(pool.submit(os.getpid).result(60), flush=True)
        pool.submit(_work).result()


def _work() -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        pass


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
