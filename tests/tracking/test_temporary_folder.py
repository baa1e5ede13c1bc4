import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from titan_exp.tracking.run_folder.files import (
    PREFIX,
    create_temporary_folder,
    hold_temporary_folder,
    redirect_temporary_files,
    remove_stale_temporary_folders,
    temporary_folder,
)

HOLD = """
import sys, time
from pathlib import Path
from titan_exp.tracking.run_folder.files import create_temporary_folder, hold_temporary_folder
path = Path(sys.argv[1]) if sys.argv[1:] else create_temporary_folder()[0]
lock = hold_temporary_folder(path)
print(path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def holder(*arguments: str) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_folder_is_removed_once_all_its_processes_are_killed(tmp_path: Path) -> None:
    other = tmp_path / "another-program"
    other.mkdir()
    launcher, path = holder()
    rank, _ = holder(str(path))
    (path / "wandb").mkdir()
    for process in (launcher, rank):
        remove_stale_temporary_folders()
        assert path.is_dir()
        process.kill()
        process.communicate()
    remove_stale_temporary_folders()
    assert not path.exists()
    assert other.is_dir()
    assert hold_temporary_folder(path) is None


def test_folders_of_other_users_and_links_stay(tmp_path: Path) -> None:
    target = tmp_path / "data"
    target.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    foreign = tmp_path / f"{PREFIX}foreign"
    foreign.mkdir()
    if os.getuid() == 0:
        os.chown(foreign, 12345, 12345)
    remove_stale_temporary_folders()
    assert target.is_dir()
    assert foreign.is_dir() == (os.getuid() == 0)


def test_folder_removed_before_it_is_held_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def mkdtemp(prefix: str) -> str:
        path = tmp_path / f"{prefix}{len(made)}"
        path.mkdir()
        if not made:
            shutil.rmtree(path)
        made.append(path)
        return str(path)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    path, lock = create_temporary_folder()
    assert path == made[1]
    assert lock.held


def test_block_removes_its_folder_and_redirects_short_paths(tmp_path: Path) -> None:
    with temporary_folder() as path:
        assert path.is_dir()
        remove_stale_temporary_folders()
        assert path.is_dir()
    assert not path.exists()
    assert redirect_temporary_files(Path("/tmp/x")) == {"TMPDIR": "/tmp/x"}
    assert redirect_temporary_files(Path("/tmp/" + 60 * "x")) == {}
