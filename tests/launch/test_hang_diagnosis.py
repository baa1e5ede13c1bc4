"""Hangs of real training on two ranks: diagnosed and ended."""

import json
from pathlib import Path

import pytest

from tests.launch.launching import Launch, ranks_of
from tests.parity.runs import EVALUATE, SMALL
from titan_exp.launch.rank.rank_env import read_record
from titan_exp.launch.watchdog import HangFiles

SECONDS = 3.0
"""For which a step may make no progress."""


def start(runs: Path, main: str, *overrides: str, ranks: int = 2, rank: int = 1) -> Launch:
    words = [*SMALL, "checkpoint.mode=off", "training.steps=4", f"parallelism.dp_replicate={ranks}", *overrides]
    return Launch(
        runs,
        "unused",
        *words,
        "tracking.log_every=1",
        f"cluster.hang_kill_minutes={SECONDS / 60}",
        "cluster.hang_warn_minutes=0.02",
        TITAN_EXP_RANK_MAIN=f"tests.launch.hanging_ranks.{main}",
        HANGING_RANK=str(rank),
        SLOW_SECONDS=str(2 * SECONDS),
    )


@pytest.mark.parametrize(
    ("main", "says", "stack"),
    [
        pytest.param(
            *("in_the_loader", "in _await_a_batch while the others wait in a collective", "_await_a_batch"),
            marks=pytest.mark.night,  # by day under SLURM, in tests/cluster/test_hang.py
        ),
        ("in_a_collective", "rank 1 did not enter a collective that the others wait in, but waits in recv", "recv"),
    ],
)
def test_blocking_rank_is_named(tmp_path: Path, main: str, says: str, stack: str) -> None:
    run = start(tmp_path, main)
    code, _, err = run.finish()
    files = HangFiles(run.folder.attempt_logs(1), 2)
    report = files.report.read_text()
    assert code == 86, err
    assert err.startswith("hung at step 3 in the training step: ")
    assert says in err
    assert stack in files.stacks(1).read_text()
    assert "sync_step_flags" in files.stacks(0).read_text()
    last = json.loads(files.recorder(0).read_text())["entries"][-1]
    assert (last["profiling_name"], last["retired"]) == ("gloo:all_reduce", False)
    for rank in (0, 1):
        assert f"rank {rank}: step 3, the training step" in report
        record = read_record(run.folder, 1, rank)
        assert record is not None
        assert record.exit == 86
    state = run.folder.read_state()
    assert state is not None
    assert (state.state, state.step, state.reason) == ("failed", 2, report.partition("\n")[0])
    assert run.folder.read_attempts()[-1].exit == 86
    assert "no progress for" in run.folder.attempt_logs(1).joinpath("rank-00000.log").read_text()
    assert ranks_of(tmp_path) == []


@pytest.mark.parametrize(
    ("main", "says", "line"),
    [
        pytest.param(
            *(
                "stopped",
                "rank 1 did not answer",
                "rank 1: no answer, so it has stopped or died, or its machine is down",
            ),
            marks=pytest.mark.night,
        ),
        pytest.param(
            *("in_native_code", "rank 1 is stuck in native code", "rank 1: in native code that blocks Python"),
            marks=pytest.mark.night,
        ),
    ],
)
def test_rank_in_native_code_is_named_and_ended(tmp_path: Path, main: str, says: str, line: str) -> None:
    run = start(tmp_path, main)
    code, _, err = run.finish()
    files = HangFiles(run.folder.attempt_logs(1), 2)
    assert code == 86, err
    assert err.startswith(f"hung at step 3 in the training step: {says}")
    assert line in files.report.read_text()
    assert "sync_step_flags" in files.stacks(0).read_text()
    native = files.stacks(1)
    assert ("hanging_ranks.py" in native.read_text()) if main == "in_native_code" else not native.exists()
    assert ranks_of(tmp_path) == []


@pytest.mark.night  # by day one of two ranks
def test_single_rank_in_native_code_is_ended(tmp_path: Path) -> None:
    run = start(tmp_path, "in_native_code", ranks=1, rank=0)
    code, _, err = run.finish()
    assert code == 86, err
    assert err.startswith("hung: rank 0 is stuck in native code")
    assert "hanging_ranks.py" in HangFiles(run.folder.attempt_logs(1), 1).stacks(0).read_text()


@pytest.mark.night
def test_slow_evaluation_is_no_hang(tmp_path: Path) -> None:
    run = start(tmp_path, "slow_evaluation", *EVALUATE.split(), "evaluation.every=4", ranks=1)
    code, _, err = run.finish()
    assert code == 0, err
    assert not list(run.folder.logs.rglob("stacks-*"))
    assert not list(run.folder.logs.rglob("hang*"))
