from pathlib import Path

from titan_exp.checkpoint.folder import CheckpointFolder


def folder_with(tmp_path: Path, *names: str) -> CheckpointFolder:
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("x")
    return CheckpointFolder(tmp_path)


def test_only_complete_checkpoints_count(tmp_path):
    folder = folder_with(tmp_path, "step-00000010", "step-00000030.partial", "step-00000020", "step-00000005.deleted")
    assert folder.complete() == [10, 20]


def test_a_folder_that_is_not_there_holds_none(tmp_path):
    assert CheckpointFolder(tmp_path / "nowhere").complete() == []


def test_publish_moves_the_partial_one_into_place(tmp_path):
    folder = folder_with(tmp_path, "step-00000010.partial")
    folder.publish(10)
    assert folder.complete() == [10]
    assert (folder.at(10) / "part").exists()
    assert not folder.partial(10).exists()


def test_publish_replaces_one_of_the_same_step(tmp_path):
    folder = folder_with(tmp_path, "step-00000010", "step-00000010.partial")
    (folder.partial(10) / "part").write_text("new")
    folder.publish(10)
    assert (folder.at(10) / "part").read_text() == "new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000010"]


def test_retain_keeps_the_newest(tmp_path):
    folder = folder_with(tmp_path, *(f"step-{step:08d}" for step in (10, 20, 30, 100_000_000)))
    folder.retain(2)
    assert folder.complete() == [30, 100_000_000]
    folder.retain(5)
    assert folder.complete() == [30, 100_000_000]


def test_clean_removes_rubble_alone(tmp_path):
    folder = folder_with(tmp_path, "step-00000010", "step-00000020.partial", "step-00000005.deleted", "mine")
    folder.clean()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine", "step-00000010"]
