"""Code snapshots: content-addressed, complete, of tracked and new files."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.config.composing import experiment
from titan_exp.launch.code_snapshot import FOLDER, take_code_snapshot


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Repository with a package of ours, an ignored file and a new one."""
    top = tmp_path / "checkout"
    for name, text in {
        "titan_exp/__init__.py": "",
        "titan_exp/a.py": "A = 1\n",
        "conf/config.yaml": "a: 1\n",
        "hydra_plugins/titan_exp_sweeper/sweeper.py": "",
        ".gitignore": "conf/local\n",
        "README.md": "",
    }.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    git(top, "init", "-q")
    git(top, "add", ".")
    (top / "conf" / "local").mkdir()
    (top / "conf" / "local" / "default.yaml").write_text("token: secret\n")
    (top / "titan_exp" / "new.py").write_text("NEW = 1\n")
    (top / "titan_exp" / "__pycache__").mkdir()
    (top / "titan_exp" / "__pycache__" / "a.pyc").write_text("")
    return top


def git(top: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(top), *words], check=True, capture_output=True)


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


PACKAGE = {
    "titan_exp/__init__.py",
    "titan_exp/a.py",
    "titan_exp/new.py",
    "conf/config.yaml",
    "hydra_plugins/titan_exp_sweeper/sweeper.py",
}


def test_a_checkout_with_new_files_and_without_ignored_ones(checkout: Path, tmp_path: Path):
    frozen = take_code_snapshot(tmp_path / "runs", [], checkout / "titan_exp")
    assert names(Path(frozen.package)) == PACKAGE
    assert (frozen.own, frozen.loose) == (None, ())


def test_the_same_content_is_one_copy_and_other_content_another(checkout: Path, tmp_path: Path):
    first = take_code_snapshot(tmp_path / "runs", [], checkout / "titan_exp").package
    assert take_code_snapshot(tmp_path / "runs", [], checkout / "titan_exp").package == first
    (checkout / "titan_exp" / "a.py").write_text("A = 2\n")
    second = take_code_snapshot(tmp_path / "runs", [], checkout / "titan_exp").package
    assert (Path(first, "titan_exp/a.py").read_text(), Path(second, "titan_exp/a.py").read_text()) == (
        "A = 1\n",
        "A = 2\n",
    )
    (checkout / "titan_exp" / "a.py").unlink()  # and not yet out of the index
    third = take_code_snapshot(tmp_path / "runs", [], checkout / "titan_exp").package
    assert not Path(third, "titan_exp/a.py").exists()
    assert len(list((tmp_path / "runs" / FOLDER).iterdir())) == 3
    if os.geteuid() == 0:  # a folder that another user has placed there is not imported
        os.chown(third, 4242, -1)
        assert take_code_snapshot(tmp_path / "runs", [], checkout / "titan_exp").package != third


def test_an_installed_package_has_no_repository(tmp_path: Path):
    site = tmp_path / "site-packages"
    for name in ("titan_exp/__init__.py", "titan_exp/conf/config.yaml", "hydra_plugins/other/x.py"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("")
    frozen = take_code_snapshot(tmp_path / "runs", [], site / "titan_exp")
    assert names(Path(frozen.package)) == {"titan_exp/__init__.py", "titan_exp/conf/config.yaml"}


def test_user_code_in_the_current_folder(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = tmp_path / "own"
    (own / "mine").mkdir(parents=True)
    (own / "mine" / "optim_of_mine.py").write_text("from mine import helper\nclass Lion: pass\n")
    (own / "mine" / "helper.py").write_text("")
    monkeypatch.chdir(own)
    run = experiment("optimizer.name=mine.optim_of_mine.Lion")
    frozen = take_code_snapshot(tmp_path / "runs", [run], checkout / "titan_exp")
    loose = tuple(str(own / "mine" / f"{name}.py") for name in ("helper", "optim_of_mine"))
    assert (frozen.own, frozen.loose) == (None, loose)
    git(own, "init", "-q")
    frozen = take_code_snapshot(tmp_path / "runs", [run], checkout / "titan_exp")
    assert frozen.own is not None
    assert names(Path(frozen.own)) == {"mine/optim_of_mine.py", "mine/helper.py"}
    assert frozen.loose == ()
    assert take_code_snapshot(tmp_path / "runs", [experiment()], checkout / "titan_exp").own is None


def test_generated_modules_and_data_of_own_packages(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = tmp_path / "generated"
    for name, text in {
        "gen/__init__.py": "from gen import _version\nfrom gen.inner import kernels\n",
        "gen/_version.py": "V = 1\n",  # ignored, and imported
        "gen/inner/__init__.py": "",
        "gen/inner/kernels.cpython-311-x86_64-linux-gnu.so": "compiled",
        "gen/words.json": "[]",
        "gen/late.py": "",  # ignored, and not seen to be imported
        "gen/secrets.json": "private",
        "gen/decay.py": "def slow(progress): return 1\n",
        "notes/todo.txt": "",
        ".gitignore": "_version.py\n*.so\nlate.py\nsecrets.json\n",
    }.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text)
    git(own, "init", "-q")
    git(own, "add", ".")
    monkeypatch.chdir(own)
    run = experiment("lr_schedule.decay=gen.decay.slow")
    frozen = take_code_snapshot(tmp_path / "runs", [run], checkout / "titan_exp", write=False)
    assert not (tmp_path / "runs").exists()
    assert frozen == take_code_snapshot(tmp_path / "runs", [run], checkout / "titan_exp")
    assert frozen.own is not None
    kept = {"__init__.py", "_version.py", "inner/__init__.py", "words.json", "decay.py"}
    kept |= {"inner/kernels.cpython-311-x86_64-linux-gnu.so"}
    assert names(Path(frozen.own)) == {f"gen/{name}" for name in kept}
    assert (frozen.loose, frozen.left_out) == ((), ("gen/late.py",))
    assert frozen.notes()[0].startswith("gen/late.py is not in the job's copy of your code, because git ignores it")
    monkeypatch.setattr("titan_exp.launch.code_snapshot.OWN_LIMIT", 150)
    (own / "gen" / "words.json").write_text("[" + " " * 200 + "]")
    frozen = take_code_snapshot(tmp_path / "runs", [run], checkout / "titan_exp")
    assert frozen.own is not None
    assert (Path(frozen.own) / "gen" / "_version.py").exists()
    assert frozen.left_out == ("gen/late.py", "gen/words.json")


def test_full_disk_leaves_no_partial_copy(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        take_code_snapshot(tmp_path / "runs", [], checkout / "titan_exp")
    assert list((tmp_path / "runs" / FOLDER).iterdir()) == []
