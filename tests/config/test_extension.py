"""Extensions: found, described, refused where they are lacking, and of a user's own package."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_exp.config import extension as registry
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import CONF_DIR, PROVIDED, extensions, lacking, shipped_options
from titan_exp.config.hydra.compose import compose
from titan_exp.config.schema.component import _require_interface, builtin_components, component
from titan_exp.config.schema.foreign_code import import_paths
from titan_exp.config.schema.typed_config import to_experiment


def test_descriptions_and_composing_import_no_torch():
    code = (
        "import sys; from titan_exp.config.extension import extensions; extensions();"
        "from titan_exp.config.hydra.compose import compose; compose();"
        "from titan_exp.config.schema.component import KINDS, config_classes; [*map(config_classes, KINDS)];"
        "assert not {'torch', 'transformers', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No extension is installed."""
    monkeypatch.setattr(registry, "FOLDER", tmp_path)
    _forget()


def _forget() -> None:
    extensions.cache_clear()
    builtin_components.cache_clear()


@pytest.fixture(autouse=True)
def installed_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()
    _forget()


@pytest.mark.usefixtures("without")
def test_what_a_missing_extension_provides_is_refused_with_its_name():
    table: dict[str, list[str]] = json.loads(PROVIDED.read_text())
    for name, words in table.items():
        for word in words:
            assert lacking(word) == f"it comes with the extension {name}, which you have not installed"
    assert lacking("model=llama_debug") == ""
    with pytest.raises(UserError, match="it comes with the extension transformers"):
        component("model", "huggingface")


PACKAGE = """
from titan_exp.config.extension import Extension

EXTENSION = Extension(name="{name}", summary="Of a test.", families={{"{family}": "{name}.family"}})
"""


def _installed(folder: Path, name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with an extension, as pip installs it: a module and an entry point."""
    (folder / name / "conf" / "model").mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    (folder / name / "extension.py").write_text(PACKAGE.format(name=name, family=family))
    (folder / name / "family.py").write_text("from titan_exp.models.llama import Config, block, spec\n")
    (folder / name / "conf" / "model" / f"{name}_small.yaml").write_text("defaults: [llama_debug, _self_]\nlayers: 1\n")
    described = folder / f"{name}-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (described / "entry_points.txt").write_text(f"[titan_exp.extensions]\n{name} = {name}.extension\n")
    monkeypatch.syspath_prepend(folder)
    _forget()


def test_a_users_package_is_an_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _installed(tmp_path, "an_extension_of_a_user", "their_llama", monkeypatch)
    assert extensions()["an_extension_of_a_user"].folder == tmp_path / "an_extension_of_a_user"
    words = ["model=an_extension_of_a_user_small", "model.architecture=their_llama"]
    found = to_experiment(compose(words))
    assert (found.model.architecture, found.model.layers) == ("their_llama", 1)
    # Their code is recorded, copied and checked before the launch, as that of an import path.
    assert import_paths(found) == {"model.architecture": "an_extension_of_a_user.family"}
    assert component("model", "their_llama").__name__ == "an_extension_of_a_user.family"
    (tmp_path / "an_extension_of_a_user" / "family.py").write_text("from titan_exp.models.llama import Config, spec\n")
    sys.modules.pop("an_extension_of_a_user.family")
    _require_interface.cache_clear()
    with pytest.raises(UserError, match="defines no block"):
        component("model", "their_llama")


def test_names_of_the_core_stay_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _installed(tmp_path, "greedy_extension", "llama", monkeypatch)
    (tmp_path / "greedy_extension" / "conf" / "model" / "llama_debug.yaml").write_text("layers: 1\n")
    assert component("model", "llama").__name__ == "titan_exp.models.llama"
    assert shipped_options("model")["llama_debug"].is_relative_to(CONF_DIR)
    assert to_experiment(compose(["model=llama_debug"])).model.layers > 1


def test_two_extensions_that_provide_the_same_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _installed(tmp_path / "one", "first_extension", "their_llama", monkeypatch)
    _installed(tmp_path / "two", "second_extension", "their_llama", monkeypatch)
    with pytest.raises(UserError, match=r"Two extensions provide model.architecture=their_llama: first_extension"):
        extensions()


def test_an_extension_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _installed(tmp_path, "broken_extension", "x", monkeypatch)
    (tmp_path / "broken_extension" / "extension.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(UserError, match=r"Cannot import the extension broken_extension.extension\n.*:1, in"):
        extensions()
