import sys
from pathlib import Path

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.import_path import find_dotted, import_dotted, is_dotted

SOURCE = """
import json as js
from os.path import join
if True:
    Conditional = 1
class Model:
    def build(self): inner = 1
def function(): local = 1
a, (b, *c) = 1, (2, 3)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package in the current directory, which is on no path yet. Importing it for nothing is an error."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    folder = tmp_path / name
    (folder / "deep").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "models.py").write_text(SOURCE)
    (folder / "deep" / "space.py").write_text("thing = 1\n")
    (folder / "dynamic.py").write_text("def __getattr__(name): return 1\n")
    (folder / "starred.py").write_text("from os import *\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return name


@pytest.mark.parametrize("name", ["Model", "Model.build", "function", "js", "join", "Conditional", "a", "b", "c"])
def test_names_are_found_without_importing(package: str, name: str):
    assert find_dotted(f"{package}.models.{name}", "model.architecture") is None
    assert not any(module.startswith(package) for module in sys.modules)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("models.Modle", "did you mean Model?"),
        ("models.local", "define local"),
        ("models.inner", "define inner"),
        ("models", "models.Name"),
        ("nothing.Model", "define nothing.Model"),
        ("", "package.module.Name"),
        ("a b", "package.module.Name"),
    ],
)
def test_names_that_are_not_there(package: str, name: str, says: str):
    violation = find_dotted(f"{package}.{name}", "model.architecture")
    assert violation is not None
    assert violation.field == "model.architecture"
    assert says in violation.remedy


def test_modules_that_make_names_as_they_like_are_trusted(package: str):
    assert find_dotted(f"{package}.dynamic.anything", "data.source") is None
    assert find_dotted(f"{package}.starred.path", "data.source") is None
    assert find_dotted("math.sqrt", "lr_schedule.decay") is None


def test_folders_without_an_init_are_packages(package: str):
    assert find_dotted(f"{package}.deep.space.thing", "data.source") is None


def test_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_decay.py").write_text(
        "class Decay:\n    @staticmethod\n    def of(progress): return 1 - progress\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert import_dotted("own_decay.Decay.of", "lr_schedule.decay")(0.25) == 0.75
    with pytest.raises(UserError, match="did you mean Decay"):
        import_dotted("own_decay.Decai", "lr_schedule.decay")
    with pytest.raises(UserError, match=r"own_decay has no Decay\.off"):
        import_dotted("own_decay.Decay.off", "lr_schedule.decay")


def test_a_module_that_fails_says_how(package: str):
    frames = r"models fails\n.*:\d+, in <module>\n.*\n  RuntimeError: imported"
    with pytest.raises(UserError, match=frames):
        import_dotted(f"{package}.models.Model", "model.architecture")


def test_what_is_dotted():
    assert is_dotted("package.Name")
    assert not is_dotted("adamw")
