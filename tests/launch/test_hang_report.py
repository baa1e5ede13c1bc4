"""Hang diagnosis from files without a hang, and limits by phase."""

import contextlib
import faulthandler
from pathlib import Path
from typing import Any

import pytest

from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.launch.watchdog import (
    COLLECTIVES,
    HangDiagnosis,
    HangFiles,
    RankStack,
    Watchdog,
    _is_own_code,
    diagnose_hang,
    format_ranks,
    limit,
)
from titan_exp.tracking.logging import FIRST_STEP, STEP, ProgressSnapshot, ProgressTracker


def at(rank: int, place: str, collective: str | None = None, **issued: int) -> RankStack:
    return RankStack(rank, "host", 100 + rank, 13, STEP, 901.0, place, collective, issued)


def concluded(*rank_stacks: RankStack, native: tuple[int, ...] = (), world: int = 4) -> HangDiagnosis:
    return diagnose_hang(rank_stacks, native=native, world_size=world, logs=Path("logs"))


def test_differing_rank_is_named() -> None:
    waiting = [at(rank, "step.py:74 in agree", "all_reduce") for rank in (0, 1, 3)]
    hang = concluded(*waiting, at(2, "loader.py:5 in read"))
    assert hang.headline == (
        "hung at step 13 in the training step: rank 2 is at loader.py:5 in read while the others wait in a collective"
    )
    lines = hang.text.splitlines()
    assert lines[2] == "rank 2: step 13, the training step, at loader.py:5 in read, for 901 s"
    assert lines[3].startswith("ranks 0-1, 3: step 13, the training step, in all_reduce, called at step.py:74 in agree")


def test_flight_recorder_finds_the_lagging_rank() -> None:
    ranks = [at(rank, "x.py:1 in f", "all_gather", world=8, tp=5 if rank < 2 else 2) for rank in range(3)]
    late = at(3, "x.py:1 in f", "all_gather", world=7, tp=2)
    assert "rank 3 did not enter" in concluded(*ranks[:2], at(2, "x.py:1 in f", "all_gather", world=8), late).headline
    everywhere = [at(rank, "x.py:1 in f", "all_gather", world=8) for rank in range(4)]
    assert "suspect the network" in concluded(*everywhere).headline
    other = at(3, "y.py:2 in g", "barrier", world=8)
    assert "different collectives, rank 3 at y.py:2 in g" in concluded(*everywhere[:3], other).headline


def test_silent_rank_is_named_first() -> None:
    hang = concluded(at(0, "a", "all_reduce"), at(1, "b"), native=(2,))
    assert hang.headline == "hung at step 13 in the training step: rank 3 did not answer"
    assert "rank 2: in native code" in hang.text
    hang = concluded(at(0, "a", "x"), at(1, "a", "x"), at(3, "a"), native=(2,))
    assert "rank 2 is stuck in native code" in hang.headline
    assert concluded(native=(0,), world=1).headline.startswith("hung: rank 0 is stuck in native code")


def test_a_single_rank_and_ranks_outside_of_collectives() -> None:
    assert concluded(at(0, "a.py:1 in f"), world=1).headline.endswith("step: rank 0 is at a.py:1 in f")
    assert "no rank is in a collective" in concluded(at(0, "a"), at(1, "b"), world=2).headline


def test_files_of_a_hang(tmp_path: Path) -> None:
    files = HangFiles(tmp_path, 2)
    assert files.report_hang() is None
    files.stacks(0).touch()
    assert files.report_hang() is None  # kept open by a rank that trains
    assert (files.declare(), files.declare(), files.report_pending()) == (True, False, True)
    files.write_rank_stack(at(0, "a", "all_reduce"))
    files.stacks(1).write_text("Timeout!\n")
    assert (files.all_reported(), files.native_ranks()) == (False, [1])
    first = files.report_hang()
    assert first is not None
    files.write_rank_stack(at(1, "b"))
    assert files.report_hang() == first  # once said, it stands
    assert not files.report_pending()
    files.remove_empty()
    assert not files.stacks(0).exists()
    assert files.stacks(1).exists()


def test_ranges_of_ranks() -> None:
    assert (format_ranks([3]), format_ranks([0, 1, 2, 5])) == ("rank 3", "ranks 0-2, 5")


def test_limit_by_phase() -> None:
    assert limit(60, ProgressSnapshot(9, STEP, 0, 1.0)) == 60
    assert limit(60, ProgressSnapshot(9, STEP, 0, 50.0)) == 500  # ten times its median
    for phase in (FIRST_STEP, "the evaluation", "the checkpoint"):
        assert limit(60, ProgressSnapshot(9, phase, 0, 1.0)) == 180


class GivenUp(Exception):
    """A watchdog ends its process."""


@pytest.mark.parametrize(("seconds", "ends"), [(400, False), (1300, True)])
def test_hang_in_slow_steps_is_warned_of_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seconds: float, ends: bool
) -> None:
    """Ten times a step of 120 s is more than both limits, of 5 and 15 minutes."""
    now = 0.0
    progress = ProgressTracker(lambda: now)
    for step, now in ((1, 0.0), (2, 120.0)):  # noqa: B007
        progress.step(step)
    now += seconds

    def give_up(reason: str) -> None:
        raise GivenUp(reason)

    def stop_after_this_poll() -> None:
        watchdog.stop()

    cluster = to_experiment(compose(["model=llama_debug"])).cluster
    files = HangFiles(tmp_path, 1)
    watchdog = Watchdog(cluster, files, rank=0, progress=progress, give_up=give_up, on_poll=stop_after_this_poll)
    try:
        with pytest.raises(GivenUp, match=r"^hung at step 3") if ends else contextlib.nullcontext():
            watchdog.run()
    finally:
        faulthandler.cancel_dump_traceback_later()
        watchdog._stacks.close()
    assert f"no progress for {seconds} s in the training step after step 2. After 1200 s we end the run" in caplog.text


def test_progress_counts_from_the_last_report() -> None:
    now = 0.0
    progress = ProgressTracker(lambda: now)
    now = 5.0
    assert progress.snapshot() == ProgressSnapshot(0, "the start", 5.0, 0.0)
    progress.begin(7)
    now = 6.0
    assert progress.snapshot() == ProgressSnapshot(7, FIRST_STEP, 1.0, 0.0)
    assert progress.snapshot().at == 8
    for step, now in ((8, 10.0), (9, 12.0), (10, 13.0), (11, 18.0)):  # noqa: B007
        progress.step(step)
    assert progress.snapshot() == ProgressSnapshot(11, STEP, 0.0, 2.0)
    with progress.phase("the evaluation"):
        now = 20.0
        assert progress.snapshot() == ProgressSnapshot(11, "the evaluation", 2.0, 2.0)
        assert progress.snapshot().at == 11
        progress.keep_alive()
        assert progress.snapshot().seconds == 0.0
    assert progress.snapshot() == ProgressSnapshot(11, STEP, 0.0, 2.0)


@pytest.mark.parametrize("packages", ["/opt/other/lib/python3.11/site-packages", "/usr/lib/python3/dist-packages"])
def test_torch_of_another_environment_is_no_own_code(packages: str) -> None:
    found: dict[str, Any] = {}
    exec(compile("def all_reduce(): ...", f"{packages}/{COLLECTIVES}", "exec"), found)
    assert not _is_own_code(found["all_reduce"].__code__)
    assert _is_own_code(concluded.__code__)
