"""Commit and diff of the working tree."""

import os
import subprocess
from pathlib import Path

import pytest

from titan_exp.launch.git import NEW_FILE_LIMIT, read_code_version
from titan_exp.tracking.run_folder.run_folder import write_atomically

TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsT"


def git(folder: Path, *arguments: str) -> str:
    identity = {f"GIT_{who}_{what}": "a@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **identity, "GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
    ).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "idea")
    package = tmp_path / "package"
    package.mkdir()
    (package / "model.py").write_text("layers = 4\n")
    (tmp_path / ".gitignore").write_text("ignored/\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


@pytest.mark.parametrize("other_owner", ["0", "1"])
def test_a_clean_repository(repository: Path, other_owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", other_owner)  # a checkout of another user, as git takes it
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    code, diff = read_code_version(repository / "package")
    monkeypatch.undo()
    assert code.commit == git(repository, "rev-parse", "HEAD").strip()
    assert (code.branch, code.dirty, diff) == ("idea", False, "")


def test_diff_restores_the_code(repository: Path) -> None:
    package = repository / "package"
    (package / "model.py").write_text("layers = 8\n")
    (package / "new.py").write_text("added = True\n")
    (package / "data.bin").write_bytes(bytes(range(256)))
    (package / "latin.txt").write_bytes("größer\r\n".encode("latin-1"))
    (repository / "ignored").mkdir()
    (repository / "ignored" / "big").write_text("no")
    (repository / "dump").write_bytes(b"0" * (NEW_FILE_LIMIT + 1))
    code, diff = read_code_version(package)
    assert (code.dirty, code.left_out, code.masked) == (True, ("dump",), False)
    git(repository, "stash", "-qu")
    write_atomically(repository.parent / "diff.patch", diff)
    git(repository, "apply", str(repository.parent / "diff.patch"))
    assert (package / "model.py").read_text() == "layers = 8\n"
    assert (package / "new.py").read_text() == "added = True\n"
    assert (package / "data.bin").read_bytes() == bytes(range(256))
    assert (package / "latin.txt").read_bytes() == "größer\r\n".encode("latin-1")
    assert "ignored" not in diff
    assert "new.py" in git(repository, "ls-files", "--others")  # the user's index is as it was


def test_untracked_files_that_are_no_code_do_not_count(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "pyvenv.cfg").write_text("home = /usr/bin\n")
    (repository / ".venv").symlink_to(elsewhere)
    (repository / "notes.txt").write_text("an idea\n")
    code, diff = read_code_version(repository / "package")
    assert code.dirty is False
    assert ".venv" not in diff
    assert "+an idea" in diff
    for name in ("mine.py", "package/table.txt"):
        (repository / name).write_text("x\n")
        assert read_code_version(repository / "package")[0].dirty is True
        (repository / name).unlink()
    (elsewhere / "module.py").write_text("x = 1\n")
    assert read_code_version(repository / "package")[0].dirty is True, "a link to modules"


def test_no_program_of_a_repository_runs(repository: Path) -> None:
    ran, program = repository / "ran", repository / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    hook = repository / ".git" / "hooks" / "post-index-change"
    hook.parent.mkdir(exist_ok=True)
    hook.symlink_to(program)
    git(repository, "config", "diff.external", str(program))
    git(repository, "config", "diff.shown.textconv", str(program))
    git(repository, "config", "core.fsmonitor", str(program))
    (repository / ".gitattributes").write_text("*.py diff=shown\n")
    ran.unlink(missing_ok=True)
    (repository / "package" / "model.py").write_text("layers = 8\n")
    (repository / "package" / "new.py").write_text("")
    assert "+layers = 8" in read_code_version(repository / "package")[1]
    assert not ran.exists()


def test_credentials_in_the_diff_are_masked(repository: Path) -> None:
    (repository / "package" / "model.py").write_text(f"token = '{TOKEN}'\n")
    (repository / "new.env").write_text("WANDB_API_KEY=" + "0123456789abcdef" * 2 + "01234567\n")
    code, diff = read_code_version(repository / "package")
    assert code.masked
    assert TOKEN not in diff
    assert "0123456789abcdef" not in diff
    assert "WANDB_API_KEY=***" in diff


def test_untracked_package_in_a_repository(repository: Path) -> None:
    installed = repository / "ignored" / "site-packages" / "package"
    installed.mkdir(parents=True)
    (installed / "model.py").write_text("")
    code, diff = read_code_version(installed)
    assert (code.commit, code.branch, code.dirty, diff) == (None, None, None, "")
    assert code.version


def test_without_a_repository(tmp_path: Path) -> None:
    code, diff = read_code_version(tmp_path)
    assert (code.commit, code.dirty, diff) == (None, None, "")


def test_before_the_first_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "model.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    code, diff = read_code_version(tmp_path)
    assert (code.commit, code.dirty) == (None, True)
    assert "+x = 1" in diff
