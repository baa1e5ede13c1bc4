import os
import shutil
from pathlib import Path

import pytest

from titan_exp.checkpoint.retention import CheckpointFolder


def folder_with(tmp_path: Path, *names: str) -> CheckpointFolder:
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("x")
    return CheckpointFolder(tmp_path)


def test_only_complete_checkpoints_count(tmp_path):
    folder = folder_with(tmp_path, "step-00000010", "step-00000030.partial", "step-00000020", "step-00000005.deleted")
    assert folder.complete_steps() == [10, 20]


def test_a_folder_that_is_not_there_holds_none(tmp_path):
    assert CheckpointFolder(tmp_path / "nowhere").complete_steps() == []


def test_publish_moves_the_partial_one_into_place(tmp_path):
    folder = folder_with(tmp_path, "step-00000010.partial")
    folder.publish(10)
    assert folder.complete_steps() == [10]
    assert (folder.path_of(10) / "part").exists()
    assert not folder.partial_path(10).exists()


def test_publish_replaces_one_of_the_same_step(tmp_path):
    folder = folder_with(tmp_path, "step-00000010", "step-00000010.partial")
    (folder.partial_path(10) / "part").write_text("new")
    folder.publish(10)
    assert (folder.path_of(10) / "part").read_text() == "new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000010"]


def test_retention_keeps_the_newest(tmp_path):
    folder = folder_with(tmp_path, *(f"step-{step:08d}" for step in (10, 20, 30, 100_000_000)))
    folder.apply_retention(2)
    assert folder.complete_steps() == [30, 100_000_000]
    folder.apply_retention(5)
    assert folder.complete_steps() == [30, 100_000_000]


def test_remove_stale_removes_only_stale_files(tmp_path):
    folder = folder_with(tmp_path, "step-00000010", "step-00000020.partial", "step-00000005.deleted", "mine")
    folder.remove_stale()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine", "step-00000010"]


def test_files_of_another_user_stay_and_nothing_else(tmp_path, monkeypatch):
    theirs = ("step-00000005.deleted", "step-00000010", "step-00000050.partial")
    folder = folder_with(tmp_path, *theirs, "step-00000020", "step-00000030", "step-00000040")
    delete = shutil.rmtree

    def denied(path, ignore_errors=False):
        if not Path(path).name.startswith(theirs):
            delete(path, ignore_errors)
        elif Path(path).exists() and not ignore_errors:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", denied)
    folder.remove_stale()
    assert not folder.partial_path(50).exists()
    with pytest.raises(PermissionError):
        folder.apply_retention(1)
    assert folder.complete_steps() == [40]
    assert len(list(tmp_path.glob("*.deleted"))) == 3
    folder.remove_stale()


def test_retention_keeps_multiples_forever(tmp_path):
    folder = folder_with(tmp_path, *(f"step-{step:08d}" for step in (10, 15, 20, 30, 35, 45, 55)))
    folder.apply_retention(2, every=10)
    assert folder.complete_steps() == [10, 20, 30, 45, 55]
    folder.apply_retention(1, every=30)
    assert folder.complete_steps() == [30, 55]


def test_a_file_keeps_a_checkpoint_while_it_exists(tmp_path):
    folder = folder_with(tmp_path, *(f"step-{step:08d}" for step in (10, 20, 30)))
    folder.keep_file(10).touch()
    folder.apply_retention(1)
    assert folder.complete_steps() == [10, 30]
    folder.keep_file(10).unlink()
    folder.apply_retention(1)
    assert folder.complete_steps() == [30]


def test_quarantined_checkpoints_are_ignored(tmp_path):
    folder = folder_with(tmp_path, "step-00000010", "step-00000020", "step-00000020.damaged")
    assert folder.quarantine(20) == tmp_path / "step-00000020.damaged"
    assert folder.complete_steps() == [10]
    folder.remove_stale()
    assert (tmp_path / "step-00000020.damaged").is_dir(), "someone may want to look at it"


class Killed(BaseException):
    """Simulates kill -9: nothing after it runs."""


def operations(folder: CheckpointFolder, monkeypatch, survives: int) -> None:
    """Let this many renames and deletions happen in the folder, and die at the next."""
    left = survives

    def counted(operation):
        def perform(*args, **options):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return operation(*args, **options)

        return perform

    monkeypatch.setattr(os, "rename", counted(os.rename))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))


@pytest.mark.parametrize("survives", range(12))
def test_crash_while_publishing_or_deleting_loses_nothing(tmp_path, monkeypatch, survives):
    """At whichever rename or deletion: the newest complete state is there, and the next start is clean."""
    folder = folder_with(tmp_path, "step-00000010", "step-00000020", "step-00000030", "step-00000030.partial")
    (folder.partial_path(30) / "part").write_text("new")
    died = False
    with monkeypatch.context() as patch:
        operations(folder, patch, survives)
        try:
            folder.publish(30)
            folder.apply_retention(1)
        except Killed:
            died = True
    assert died == (survives < 10), "the count of operations is known"
    folder.remove_stale()
    assert folder.complete_steps()[-1] == 30
    assert (folder.path_of(30) / "part").read_text() in ("x", "new")
    folder.apply_retention(1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000030"]
