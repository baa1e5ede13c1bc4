"""Built-in sources describe themselves, and are described without being imported."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import provided
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.builtins import sources
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.data.sources import base
from titan_exp.rules import check


def test_every_source_says_what_its_module_says():
    modules = {name: f"titan_exp.data.sources.{name}" for name in sources()} | provided("sources")
    for name, described in sources().items():
        assert described == import_module(modules[name]).DESCRIPTION
    opening = ("\ndef build(", "\nbuild_sampler")
    files = {file.stem: file.read_text() for file in Path(base.__file__).parent.glob("*.py")}
    assert {name for name, text in files.items() if any(word in text for word in opening)} == {*sources()} - {
        *provided("sources")
    }


def test_no_source_is_imported_for_it():
    code = "import sys; from titan_exp.config.schema.builtins import sources; sources(); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "titan_exp.config.schema.builtins" in found
    assert "titan_exp.data" not in found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.paths=[notes]"], "data.paths=[notes]"),
        (["data.document=line"], "data.document=line"),
        (["data.subset=en"], "data.subset=en"),
        (["data=tokens", "data.paths=[stores/a]", "data.document=line"], "data.document=line"),
        (["data=tokens", "data.paths=[stores/a]", "data.streaming=true"], "data.streaming=true"),
    ],
)
def test_a_key_that_a_source_ignores_is_refused(words: list[str], said: str):
    with pytest.raises(UserError) as refused:
        check(resolve_layout(to_experiment(compose(words)), 1))
    assert said in str(refused.value)
