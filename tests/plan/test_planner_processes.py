"""Replays of several ranks in processes give each rank the statistics of a replay in this one."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path

import pytest

from titan_exp.plan import planner_processes
from titan_exp.plan.caching_allocator import MIB, Events, Reserved, steady_reserved
from titan_exp.plan.planner_processes import PlannerProcesses


def events(rank: int) -> tuple[Events, Events]:
    """Setup and step of a rank that keeps one storage, and allocates more with a higher rank."""
    sizes = enumerate([(1 + rank) * 30 * MIB, 700, 4 * MIB], 2)
    return Events([(1, 64 * MIB, 0)]), Events([event for at, size in sizes for event in ((at, size, 0), (at, 0, 0))])


def replayed_here(ranks: int) -> list[Reserved]:
    return [steady_reserved(*events(rank), expandable=False) for rank in range(ranks)]


def process() -> int:
    return os.getpid()


def lock_of_progress_bars() -> str:
    from tqdm import tqdm

    return type(tqdm.get_lock()).__name__


@pytest.mark.parametrize(("cores", "started"), [(0, False), (2, True)])
def test_processes_replay_long_ranks_as_this_one_would(cores: int, started: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner_processes, "MIN_EVENTS", 5)
    with PlannerProcesses(cores) as processes:
        calls = [processes.replay(*events(rank), expandable=False, capacity=None) for rank in range(3)]
        found = [call.result() for call in calls]
    assert found == replayed_here(3)
    assert len({each.reserved for each in found}) == 3
    assert ("_pool" in vars(processes)) is started


def test_a_call_runs_elsewhere_and_its_errors_are_raised_here():
    with PlannerProcesses(1) as processes:
        first, second = processes.call(process), processes.call(int, "no number")
        assert first._future is not None
        wait([first._future], 60)
        assert first.result() != os.getpid()
        with pytest.raises(ValueError, match="no number"):
            second.result()


def test_a_killed_process_leaves_no_semaphore():
    with PlannerProcesses(1) as processes:
        call = processes.call(lock_of_progress_bars)
        assert call._future is not None
        wait([call._future], 60)
        assert call.result() == "RLock"


def test_calls_that_no_process_has_begun_are_made_here():
    with PlannerProcesses(1) as processes:
        processes.call(time.sleep, 1)
        calls = [processes.call(process) for _ in range(8)]
        assert calls[-1].result() == os.getpid()


def test_ranks_of_a_killed_process_are_replayed_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner_processes, "MIN_EVENTS", 5)
    with PlannerProcesses(1) as processes:
        processes._pool.submit(os._exit, 9)
        calls = [processes.replay(*events(rank), expandable=False, capacity=None) for rank in range(2)]
        found = [call.result() for call in calls]
    assert found == replayed_here(2)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the signals that a process blocks are in /proc")
def test_ctrl_c_does_not_interrupt_the_imports_of_the_server():
    begin = (
        "import os; from multiprocessing import forkserver; from titan_exp.plan.planner_processes import *; "
        "start_forkserver(); server = forkserver._forkserver._forkserver_pid; "
        "print(open(f'/proc/{server}/status').read()); os.kill(server, 9)"
    )
    command = [sys.executable, "-W", "ignore::ResourceWarning", "-c", begin]
    status = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    (blocked,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk"))
    assert blocked & 1 << signal.SIGINT - 1
