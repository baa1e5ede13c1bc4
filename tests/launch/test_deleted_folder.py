"""Run folders that are deleted, moved or emptied while their processes run."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launch.fake_ranks import renew_folder
from tests.launch.launching import Launch, ranks_of
from tests.launch.test_rank_main import finish, make_run, start, wait_until
from titan_exp.launch.run_status import run_status
from titan_exp.tracking.run_folder.folder_owner import FolderWatch
from titan_exp.tracking.run_folder.run_folder import RunFolder


def delete(path: Path) -> None:
    shutil.rmtree(path)


def move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def empty(path: Path) -> None:
    for entry in path.glob("[!.]*"):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


WORDS: dict[Callable[[Path], None], str] = {
    delete: "somebody deleted the run folder",
    move: "somebody moved the run folder",
    empty: "somebody deleted config.yaml",
}


@pytest.mark.parametrize("lose", [move, *(pytest.param(way, marks=pytest.mark.night) for way in (delete, empty))])
def test_run_ends_in_words_and_writes_nothing_more(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    run = Launch(tmp_path, "wait_for_ever", "parallelism.dp_shard=2")
    folder = run.wait_for("seen-0.json", "seen-1.json")
    lose(folder.path)
    code, out, err = run.finish()
    assert code == 1
    assert WORDS[lose] in err
    assert "Traceback" not in out + err
    assert not ranks_of(tmp_path)
    assert not list(folder.path.glob("[!.]*"))
    if lose is move:
        moved = RunFolder(folder.path.with_name("elsewhere"))
        assert f"titan-exp retry {moved.path}" in err
        state = moved.read_state()
        assert state is not None
        assert (state.state, moved.read_attempts()[0].exit) == ("failed", 1)
    else:
        assert folder.path.exists() == (lose is empty)


@pytest.mark.parametrize("lose", WORDS)
def test_rank_without_a_launcher_ends(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    folder = make_run(tmp_path)
    rank = start(folder, "wait_for_ever")
    wait_until((folder.path / "seen-0.json").exists)
    lose(folder.path)
    code, _, err = finish(rank)
    assert code == 1
    assert WORDS[lose] in err
    assert not list(folder.path.glob("[!.]*"))


RECORDS = ("state.json", "attempts.jsonl", "stop", "logs/attempt-001/rank-*.json")


@pytest.mark.parametrize("launched", [True, False], ids=["launched", "by hand"])
def test_run_begun_anew_at_the_same_path_is_left_alone(tmp_path: Path, launched: bool) -> None:
    run = Launch(tmp_path, "wait_for_ever", "parallelism.dp_shard=2") if launched else None
    folder = make_run(tmp_path) if run is None else run.wait_for("seen-0.json", "seen-1.json")
    rank = None if run else start(folder, "wait_for_ever")
    wait_until((folder.path / "seen-0.json").exists)
    renew_folder(str(folder.path))
    before = {path.name: path.read_bytes() for records in RECORDS for path in folder.path.glob(records)}
    if rank is not None:
        rank.terminate()
        assert finish(rank)[0] == 1
    if run is not None:
        assert run.finish()[0] == 1
    assert {path.name: path.read_bytes() for records in RECORDS for path in folder.path.glob(records)} == before


def test_rank_that_ends_well_does_not_end_the_run_begun_anew(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert finish(start(folder, "renew_folder"))[0] == 0
    (attempt,) = folder.read_attempts()
    assert (attempt.end, attempt.exit) == (None, None)
    assert '"end": null' in next(folder.path.glob("logs/attempt-001/rank-*.json")).read_text()


def test_loss_is_the_cause_of_a_rank_error(tmp_path: Path) -> None:
    """The error of a rank that finds its files gone before the watchdog's poll."""
    folder = make_run(tmp_path)
    code, _, err = finish(start(folder, "lose_folder"))
    assert code == 1
    assert "somebody deleted the run folder" in err
    assert "Traceback" not in err
    assert not folder.path.exists()


def test_new_folder_at_the_same_path_is_not_the_run(tmp_path: Path) -> None:
    clock = iter([0.0, 2.0])
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").touch()
    watch = FolderWatch(path, lambda: next(clock))
    assert watch.loss() is None
    shutil.rmtree(path)
    path.mkdir()
    (path / "config.yaml").touch()
    assert watch.loss() is None  # not yet confirmed
    assert "somebody deleted the run folder" in (watch.loss() or "")
    assert watch.moved_to() is None


def test_link_to_the_moved_folder_keeps_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").touch()
    watch = FolderWatch(path)
    path.rename(tmp_path / "big")
    assert watch.loss() is None
    path.symlink_to(tmp_path / "big")
    assert watch.confirmed_loss() is None
    assert watch.moved_to() is None


def test_status_without_state_json_is_that_of_the_attempts(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert finish(start(folder, "succeed"))[0] == 0
    folder.state.unlink()
    assert run_status(folder).state == "done"
    folder.update_attempt(1, exit=1, reason="rank 0: out of luck")
    status = run_status(folder)
    assert (status.state, status.reason, status.attempt) == ("failed", "rank 0: out of luck", 1)
    folder.attempts.unlink()
    assert run_status(folder).state == "new"
