"""Folders in which another user could replace what a run executes are refused; those of a group are not."""

import os
import stat
from pathlib import Path

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.folder_owner import own_folder, refuse_foreign_folders

DAEMON, BIN = 1, 2
"""User ids that every Linux has; each is the only member of the group of the same number."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")


def made(path: Path, mode: int, owner: int | None = None, group: int = 0) -> Path:
    path.mkdir()
    if owner is not None:
        os.chown(path, owner, group)
    path.chmod(mode)
    return path


def test_own_folders_are_closed_to_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        created = own_folder(tmp_path / "runs" / ".code")
    finally:
        os.umask(before)
    assert stat.S_IMODE(created.stat().st_mode) == 0o755
    created.chmod(0o2775)  # as an older version left it in a folder of a group
    own_folder(created)
    assert stat.S_IMODE(created.stat().st_mode) == 0o2755
    (tmp_path / "link").symlink_to(created)
    with pytest.raises(UserError, match=r"link .*paths\.runs=~/runs"):
        own_folder(tmp_path / "link")


@as_root
def test_a_folder_that_another_user_put_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="belongs to daemon"):
        own_folder(made(tmp_path / ".code-0", 0o755, DAEMON))


@as_root
@pytest.mark.parametrize(
    ("runs", "name", "run", "refusal"),
    [
        ((0o755, 0, 0), (0o755, 0), (0o755, 0), None),
        ((0o1777, 0, 0), (0o755, 0), None, None),
        ((0o1777, 0, 0), (0o777, DAEMON), None, r"idea belongs to daemon.* experiment\.name=idea-root"),
        ((0o1777, 0, 0), (0o755, DAEMON), (0o755, 0), "idea belongs to daemon"),
        ((0o1777, 0, 0), (0o1777, 0), (0o755, DAEMON), "idea/0123 belongs to daemon"),
        ((0o755, 0, 0), (0o777, 0), None, r"idea: any user .*chmod o-w \S*idea`"),
        ((0o777, 0, 0), (0o755, 0), None, r"runs: any user .*chmod \+t \S*runs`"),
        ((0o755, DAEMON, 0), (0o755, 0), None, r"runs belongs to daemon.* paths\.runs=~/runs"),
        # A group shares its runs: its members continue each other's.
        ((0o2775, DAEMON, DAEMON), (0o2775, DAEMON), (0o2775, DAEMON), None),
        ((0o2775, 0, DAEMON), (0o2775, DAEMON), (0o2775, 0), None),
        ((0o2775, 0, DAEMON), (0o2775, BIN), None, "idea belongs to bin"),
        ((0o2755, 0, DAEMON), (0o2775, DAEMON), None, "idea belongs to daemon"),
        ((0o1777, 0, DAEMON), (0o2775, DAEMON), None, "idea belongs to daemon"),
        ((0o2775, 0, DAEMON), (0o2775, 4242), None, None),
        # In a container, a number without a name is the owner of the machine's folder.
        ((0o755, 4242, 0), (0o755, 4242), None, None),
    ],
)
def test_foreign_folders(
    tmp_path: Path,
    runs: tuple[int, int, int],
    name: tuple[int, int],
    run: tuple[int, int] | None,
    refusal: str | None,
) -> None:
    top = made(tmp_path / "runs", *runs)
    inner = made(top / "idea", *name)
    if run is not None:
        made(inner / "0123", *run)
    if refusal is None:
        refuse_foreign_folders(top, inner / "0123")
        assert [path.name for path in inner.iterdir()] == ["0123"] * (run is not None)
    else:
        with pytest.raises(UserError, match=refusal):
            refuse_foreign_folders(top, inner / "0123")


@as_root
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    runs, mine = made(tmp_path / "runs", 0o1777), made(tmp_path / "mine", 0o755)
    (runs / "idea").symlink_to(mine)
    os.lchown(runs / "idea", DAEMON, DAEMON)
    with pytest.raises(UserError, match="idea belongs to daemon"):
        refuse_foreign_folders(runs, runs / "idea" / "0123")
