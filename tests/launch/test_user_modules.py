"""Code of the user: found by import path without importing, recorded per repository, restored by git apply."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import titan_exp
from tests.config.composing import experiment
from tests.launch.test_git import TOKEN, git
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.launch.code_snapshot import user_modules
from titan_exp.launch.git import read_code_version
from titan_exp.launch.provenance import PART, Provenance

RESOLVERS = ("import_dotted", "find_dotted", "_known")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two repositories and a folder without one, all on the import path; the current folder is the first."""
    files = {
        "lab/nets_of_mine/__init__.py": "",
        "lab/nets_of_mine/net.py": "from .parts import layer\nimport shared_of_mine.ops\nimport json, torch\n",
        "lab/nets_of_mine/parts.py": "def later():\n    from loose_of_mine import helper\n",
        "lab/README.md": "lab\n",
        "library/src/shared_of_mine/__init__.py": "",
        "library/src/shared_of_mine/ops.py": "def relu(x): return x\n",
        "loose/loose_of_mine.py": "helper = 1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for repository in ("lab", "library"):
        git(tmp_path / repository, "init", "-q", "-b", "main")
        git(tmp_path / repository, "add", ".")
        git(tmp_path / repository, "commit", "-qm", "first")
    git(tmp_path / "lab", "remote", "add", "origin", f"https://me:{TOKEN}@example.org/lab.git")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "library" / "src"), str(tmp_path / "loose")])
    monkeypatch.chdir(tmp_path / "lab")
    yield tmp_path
    for name in [name for name in sys.modules if "_of_mine" in name]:
        pytest.fail(f"{name} was imported")


def run_of(name: str = "nets_of_mine.net.Net") -> Experiment:
    base = experiment()
    return replace(base, optimizer=replace(base.optimizer, name=name))


def provenance() -> Provenance:
    return Provenance(*read_code_version(), {})


def diff_parts(patch: str) -> dict[str, str]:
    """Parts of a diff.patch by the name of their repository."""
    heads = re.split(rf"^{re.escape(PART)}", patch, flags=re.MULTILINE)[1:]
    return {part.partition(":")[0]: part.partition("\n")[2] for part in heads}


def test_every_key_with_an_import_path_is_known() -> None:
    """Keys in calls of the functions that resolve import paths, in the whole package."""
    found = set()
    for path in Path(titan_exp.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in RESOLVERS:
                found |= {
                    word.value
                    for word in node.args
                    if isinstance(word, ast.Constant) and str(word.value).count(".") == 1 and " " not in str(word.value)
                }
    own = {key for key in found if key.partition(".")[0] in Experiment.__dataclass_fields__}
    run = experiment()
    for key in own:
        group, _, name = key.partition(".")
        run = replace(run, **{group: replace(getattr(run, group), **{name: "mine.thing.Name"})})
    assert set(import_paths(run)) == own != set()


def test_modules_are_followed_without_importing(home: Path) -> None:
    found = user_modules(import_paths(run_of()).values())
    assert found == {
        "nets_of_mine": home / "lab/nets_of_mine/__init__.py",
        "nets_of_mine.net": home / "lab/nets_of_mine/net.py",
        "nets_of_mine.parts": home / "lab/nets_of_mine/parts.py",
        "shared_of_mine": home / "library/src/shared_of_mine/__init__.py",
        "shared_of_mine.ops": home / "library/src/shared_of_mine/ops.py",
        "loose_of_mine": home / "loose/loose_of_mine.py",
    }


def test_repositories_files_and_their_states(home: Path) -> None:
    record = json.loads(provenance().code_record(run_of()).to_json())
    assert record["import_paths"] == {"optimizer.name": "nets_of_mine.net.Net"}
    lab, library, loose = record["imported"]
    assert (lab["name"], lab["path"], lab["branch"], lab["dirty"]) == ("lab", str(home / "lab"), "main", False)
    assert lab["commit"] == git(home / "lab", "rev-parse", "HEAD").strip()
    assert lab["remote"] == "https://example.org/lab.git"
    assert set(lab["files"]) == {f"nets_of_mine/{name}.py" for name in ("__init__", "net", "parts")}
    assert (library["name"], library["dirty"]) == ("library", False)
    assert (loose["name"], loose["commit"], set(loose["files"])) == ("loose", None, {"loose_of_mine.py"})
    assert TOKEN not in json.dumps(record)
    assert "imported" not in json.loads(provenance().code_record(experiment()).to_json())


def test_every_part_of_the_diff_restores_its_repository(home: Path, tmp_path: Path) -> None:
    (home / "lab/nets_of_mine/net.py").write_text("import shared_of_mine.ops\nwidth = 2\n")
    (home / "lab/nets_of_mine/parts.py").unlink()
    (home / "lab/nets_of_mine/new.py").write_text("new = 1\n")
    (home / "lab/nets_of_mine/kernel.cu").write_bytes(bytes(range(256)))
    (home / "lab/runs").mkdir()
    (home / "lab/runs/metrics.jsonl").write_text("{}\n")
    (home / "library/src/shared_of_mine/ops.py").write_text("import loose_of_mine\nx = 1")
    settings = home / "gitconfig"
    settings.write_text("[diff]\nnoprefix = true\n")
    kept = {**os.environ}
    os.environ["GIT_CONFIG_GLOBAL"] = str(settings)
    try:
        patch = provenance().patch(run_of())
    finally:
        os.environ.clear()
        os.environ.update(kept)
    parts = diff_parts(patch)
    assert [name for name in parts if name != "titan_exp"] == ["lab", "library", "loose"]
    for name in ("lab", "library", "loose"):
        fresh = tmp_path / "fresh" / name
        if name == "loose":
            fresh.mkdir()
            git(fresh, "init", "-q")
        else:
            git(tmp_path, "clone", "-q", str(home / name), str(fresh))
        (tmp_path / "part.patch").write_bytes(parts[name].encode(errors="surrogateescape"))
        git(fresh, "apply", str(tmp_path / "part.patch"))
        expected = tree(home / name)
        expected.pop("runs/metrics.jsonl", None)
        assert tree(fresh) == expected


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }


def test_a_part_can_be_cut_out_by_hand(home: Path, tmp_path: Path) -> None:
    """The command of the guide."""
    (home / "lab/nets_of_mine/net.py").write_text("width = 2\n")
    (home / "library/src/shared_of_mine/ops.py").write_text("x = 1\n")
    (tmp_path / "diff.patch").write_text(provenance().patch(run_of("shared_of_mine.ops.X")))
    git(home / "library", "stash", "-q")
    cut = f"""awk '/^# code of /{{on = /code of library:/}} on' {tmp_path}/diff.patch | git apply"""
    subprocess.run(cut, shell=True, check=True, cwd=home / "library")
    assert (home / "library/src/shared_of_mine/ops.py").read_text() == "x = 1\n"


def test_credentials_in_loose_files_are_masked(home: Path) -> None:
    (home / "loose/loose_of_mine.py").write_text(f"token = '{TOKEN}'\n")
    (part,) = [part for part, _ in provenance().imported(run_of()) if part.name == "loose"]
    assert part.masked
    assert TOKEN not in provenance().patch(run_of())


def test_empty_files_and_those_too_large(home: Path, tmp_path: Path) -> None:
    (home / "loose/pack_of_mine").mkdir()
    (home / "loose/pack_of_mine/__init__.py").write_text("")
    (home / "loose/pack_of_mine/big.py").write_text("#" * 1_000_001)
    part, patch = provenance().imported(run_of("pack_of_mine.big.X"))[0]
    assert part.left_out == ("pack_of_mine/big.py",)
    assert part.files["pack_of_mine/big.py"] == "1000001 bytes"
    git(tmp_path, "init", "-q", "fresh")
    subprocess.run(["git", "-C", tmp_path / "fresh", "apply"], input=patch.encode(), check=True)
    assert tree(tmp_path / "fresh") == {"pack_of_mine/__init__.py": b""}


def test_installed_packages_have_a_version(home: Path) -> None:
    (part,) = [part for part, _ in provenance().imported(run_of("submitit.core.core.Job"))]
    assert (part.name, part.commit) == ("submitit", None)
    assert part.version
    assert "submitit/core/core.py" in part.files
    (large,) = [part for part, _ in provenance().imported(run_of("torch.optim.RAdam"))]
    assert (large.name, large.files) == ("torch", {})


def test_code_in_the_repository_of_titan_exp(home: Path) -> None:
    found = provenance().imported(run_of("tests.data.corpora.OwnTable"))
    assert [(part.name, diff) for part, diff in found] == [(found[0][0].name, "")]
    assert "tests/data/corpora.py" in found[0][0].files


def test_repositories_of_one_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = home / "other" / "lab"
    (other / "more_of_mine").mkdir(parents=True)
    (other / "more_of_mine/__init__.py").write_text("")
    git(other, "init", "-q")
    git(other, "add", ".")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other)])
    (home / "lab/nets_of_mine/net.py").write_text("import more_of_mine\n")
    assert sorted(part.name for part, _ in provenance().imported(run_of())) == sorted([str(home / "lab"), str(other)])
