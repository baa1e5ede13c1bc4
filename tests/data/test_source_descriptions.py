"""Built-in sources describe themselves, and are described without being imported."""

import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import provided
from titan_exp.config.hydra.compose import compose
from titan_exp.config.layout.resolved_layout import resolve_layout
from titan_exp.config.schema.data_sets import source_member
from titan_exp.config.schema.foreign_code import sources
from titan_exp.config.schema.typed_config import to_experiment
from titan_exp.data.sources import base
from titan_exp.rules import check


def test_every_source_says_what_its_module_says():
    modules = {name: f"titan_exp.data.sources.{name}" for name in sources()} | provided("sources")
    for name, described in sources().items():
        stated = import_module(modules[name]).DESCRIPTION
        assert replace(described, has_options=stated.has_options) == stated
        assert described.has_options == (source_member(name, "Options") is not None)
    opening = ("\ndef build(", "\nbuild = ", "\nbuild_sampler")
    files = {file.stem: file.read_text() for file in Path(base.__file__).parent.glob("*.py")}
    assert {name for name, text in files.items() if any(word in text for word in opening)} == {*sources()} - {
        *provided("sources")
    }


def test_nothing_asks_for_the_name_of_a_source():
    """Rules and loaders ask the description, so that a new source gets every rule that fits it."""
    named = "|".join(sources())
    asked = re.compile(
        rf"\.source\s*(==|!=|\bin\b|\bnot in\b)\s*[\"'(\[{{]|[\"']({named})[\"']: *\(|[\"']python_stdlib[\"']"
    )
    package = Path(base.__file__).parents[2]
    files = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    core = {name: text for name, text in files.items() if not name.startswith(("extensions/", "data/sources/"))}
    assert [name for name, text in core.items() if asked.search(text)] == []


def test_no_source_is_imported_for_it():
    code = "import sys; from titan_exp.config.schema.foreign_code import sources; sources(); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "titan_exp.config.schema.foreign_code" in found
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
