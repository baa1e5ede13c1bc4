"""Replays of several ranks in processes give each rank the statistics of a replay in this one."""

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from titan_exp.plan import replay_processes
from titan_exp.plan.cuda.caching_allocator import MIB, Event, steady_reserved
from titan_exp.plan.replay_processes import ReplayProcesses


def trace(rank: int) -> Any:
    """A rank that keeps one storage, and allocates more with a higher rank."""
    sizes = [(1 + rank) * 30 * MIB, 700, 4 * MIB]
    step = [event for at, size in enumerate(sizes, 2) for event in (Event(at, size, 0), Event(at, 0, 0))]
    return cast(Any, SimpleNamespace(setup_events=[Event(1, 64 * MIB, 0)], step_events=step))


@pytest.mark.parametrize(("ranks", "started"), [(1, False), (3, True)])
def test_processes_replay_several_long_ranks_as_this_one_would(
    ranks: int, started: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replay_processes, "MIN_EVENTS", 5)
    monkeypatch.setattr(replay_processes, "usable_cores", lambda: 2)
    with ReplayProcesses(ranks, expandable=False, capacity=None) as replays:
        for rank in range(ranks):
            replays.submit(rank, trace(rank))
        found = [replays.result(rank) for rank in range(ranks)]
    events = [(trace(rank).setup_events, trace(rank).step_events) for rank in range(ranks)]
    assert found == [steady_reserved(*each, expandable=False) for each in events]
    assert len({each.reserved for each in found}) == ranks
    assert replays._started is started


def test_ranks_of_a_killed_process_are_replayed_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replay_processes, "MIN_EVENTS", 5)
    monkeypatch.setattr(replay_processes, "usable_cores", lambda: 2)
    with ReplayProcesses(2, expandable=False, capacity=None) as replays:
        replays._pool.submit(os._exit, 9)
        for rank in range(2):
            replays.submit(rank, trace(rank))
        found = [replays.result(rank) for rank in range(2)]
    assert found == [
        steady_reserved(trace(rank).setup_events, trace(rank).step_events, expandable=False) for rank in range(2)
    ]
