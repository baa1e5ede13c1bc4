"""Ranks that hold up the others: judged by made-up times, and found in a run with a rank made slow on purpose."""

import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.parity.runs import train
from tests.patching import patch
from titan_exp.trainer.profiling.step_times import ROWS, OwnTimes, Stragglers


def times(*own: float, probe: tuple[float, ...] | None = None) -> list[OwnTimes]:
    probes = probe or (1e-4,) * len(own)
    return [OwnTimes(step=1.0, own=each, data=0.0, probe=probes[rank]) for rank, each in enumerate(own)]


def test_a_rank_is_named_once_when_it_has_been_slow_for_some_rows():
    stragglers = Stragglers(4, "cpu")
    slow = times(1.0, 1.0, 1.5, 1.1)
    named = [[found.rank for found in stragglers.find(slow)] for _ in range(ROWS + 2)]
    assert named == [[], [], [2], [], []]
    assert stragglers.find(times(1.0, 1.0, 1.0, 1.0)) == []
    assert [[found.rank for found in stragglers.find(slow)] for _ in range(ROWS)] == [[], [], [2]]


def test_a_row_in_which_it_was_as_quick_as_the_others_begins_anew():
    stragglers = Stragglers(2, "cpu")
    rows = [times(1.0, 2.0), times(1.0, 2.0), times(1.0, 1.1), times(1.0, 2.0), times(1.0, 2.0)]
    assert [stragglers.find(row) for row in rows] == [[]] * 5


def test_a_little_slower_and_microseconds_are_nothing():
    stragglers = Stragglers(4, "cpu")
    for _ in range(5):
        assert stragglers.find(times(1.0, 1.0, 1.25, 1.0)) == []
        assert stragglers.find(times(1e-4, 1e-4, 1e-3, 1e-4)) == []


def test_stages_of_a_pipeline_are_not_compared_with_each_other():
    stragglers = Stragglers(2, "cpu")
    for _ in range(ROWS + 1):
        assert stragglers.find(times(1.0, 1.0, 3.0, 3.0)) == []
    found = [stragglers.find(times(1.0, 1.0, 3.0, 6.0)) for _ in range(ROWS)][-1]
    assert [straggler.rank for straggler in found] == [3]
    alone = Stragglers(1, "cpu")
    for _ in range(ROWS + 1):
        assert alone.find(times(1.0, 5.0)) == []


def test_a_slow_device_is_named_in_every_layout():
    stragglers = Stragglers(1, "cpu")
    row = times(1.0, 5.0, 1.0, probe=(1e-4, 1e-4, 2e-4))
    found = [stragglers.find(row) for _ in range(ROWS)][-1]
    assert [straggler.rank for straggler in found] == [2]
    assert "2.0 times as long as the others' for the same small matmul" in found[0].reason


def test_a_rank_made_slow_is_named_and_the_rows_say_by_how_much(tmp_path: Path):
    """Both ranks' steps take equally long, because they wait for each other: only the slow one's own part is longer."""
    said = tmp_path / "said.txt"
    slow = partial(_make_slow, 1, str(said))
    rows = train(tmp_path / "run", "parallelism.dp_shard=2", "training.steps=6", mutate=slow).rows
    for row in rows[1:]:
        # Of two ranks the median is the mean.
        assert row["own_time_max"] > row["own_time_median"] + 0.05
        assert row["step_time_median"] > 0.2
    lines = said.read_text().splitlines()
    assert len([line for line in lines if line.startswith("rank 1 is slow, for 3 rows up to step")]) == 1
    assert not [line for line in lines if line.startswith("rank 0 is slow") and "own time" in line]


def _make_slow(rank: int, said: str) -> None:
    """On each rank, before it trains: one of them computes in vain, and rank 0's log goes to a file."""
    if os.environ["RANK"] == "0":
        logging.getLogger("titan_exp").addHandler(logging.FileHandler(said))

    def make(train_step: Any) -> Any:
        def slow(*args: Any, **kwargs: Any) -> Any:
            end = time.thread_time() + (0.2 if int(os.environ["RANK"]) == rank else 0.0)
            while time.thread_time() < end:
                pass
            return train_step(*args, **kwargs)

        return slow

    patch("titan_exp.trainer.trainer.train_step", make)
