import sys
from pathlib import Path

import pytest

from tests.config.composing import experiment, refused
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.component import find_dotted, import_dotted, import_module, is_dotted
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.launch.code_snapshot import user_modules
from titan_exp.rules import violations

FAMILY = "from titan_exp.models.llama import Config, block, spec\n"

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
    frames = r"models\n.*:\d+, in <module>\n.*\n  RuntimeError: imported"
    with pytest.raises(UserError, match=frames):
        import_dotted(f"{package}.models.Model", "model.architecture")


def test_what_is_dotted():
    assert is_dotted("package.Name")
    assert not is_dotted("adamw")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the current folder, with a name of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return f"own_{tmp_path.name}".replace("-", "_")


def test_a_module_without_a_dot_is_a_component(module: str):
    """A file or a package in the current folder; it counts as the user's code, as an import path does."""
    Path(f"{module}.py").write_text(FAMILY)
    Path(f"{module}_too").mkdir()
    Path(f"{module}_too", "__init__.py").write_text(FAMILY)
    for name in (module, f"{module}_too"):
        found = experiment("model=llama_debug", f"model.architecture={name}")
        assert import_paths(found) == {"model.architecture": name}
        assert violations(found) == []
        assert user_modules([name]).keys() >= {name}


def test_a_module_that_is_no_component_says_what_it_lacks(module: str):
    Path(f"{module}.py").write_text("Config = 1\n")
    (found,) = refused("model=llama_debug", f"optimizer.name={module}")
    assert found.reason == f"the module {module} defines no build"


@pytest.mark.parametrize(
    ("key", "name", "offer"),
    [
        ("model.architecture", "lama", "did you mean llama"),
        ("optimizer.name", "adamx", "did you mean adamw?"),
        ("parametrization.name", "completp", "did you mean completep?"),
        ("optimizer.name", "numpy", "Built in are "),
        ("model.architecture", "antigravity", "Built in are "),
        ("model.architecture", "curses", "Built in are "),
    ],
)
def test_a_mistyped_word_is_no_module(key: str, name: str, offer: str):
    """Also where a module of that name is installed, which is not imported."""
    before = {*sys.modules}
    (found,) = refused("model=llama_debug", f"{key}={name}")
    assert found.reason.startswith("unknown ")
    assert offer in found.remedy
    assert not {"antigravity", "curses"} & ({*sys.modules} - before)


def test_a_built_in_name_is_not_taken_from_the_current_folder(module: str):
    Path("llama.py").write_text("raise RuntimeError")
    assert type(experiment("model=llama_debug").model).__module__ == "titan_exp.models.llama"


def test_a_module_that_is_no_python_is_found_and_says_where(module: str):
    Path(f"{module}.py").write_text("def x(:\n")
    assert find_dotted(f"{module}.Name", "data.source") is None
    for name in (module, f"{module}.Name"):
        with pytest.raises(UserError, match=r"SyntaxError: invalid syntax"):
            import_module(module, name, "data.source")
    with pytest.raises(UserError, match=r"SyntaxError: invalid syntax"):
        experiment("model=llama_debug", f"model.architecture={module}")
