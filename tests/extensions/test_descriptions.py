"""Descriptions of the extensions of this repository, and the table of what they provide."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_exp.config.extension import FOLDER, PROVIDED, extensions, help_line, load, provided_words

OWN = {name: found for name, found in extensions().items() if found.folder.is_relative_to(FOLDER)}


def test_the_table_of_provided_words_is_current(golden: Callable[[Path, str], None]):
    words = {name: list(provided_words(found)) for name, found in OWN.items()}
    golden(PROVIDED, f"{json.dumps(words, indent=2)}\n")


def test_every_folder_is_an_extension():
    assert [*OWN] == sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))


@pytest.mark.parametrize("name", OWN)
def test_a_description_is_true(name: str):
    found = OWN[name]
    assert (found.name, found.summary[-1]) == (found.folder.name, ".")
    alone = (path for path in (found.rules, found.commit, found.updates, found.exchange, found.worlds) if path)
    for path in (*found.families.values(), *found.resolvers.values(), *found.reports.values(), *alone):
        assert load(path) is not None
    for path in (*found.verbs.values(), *found.observations.values()):
        assert load(path) is not None
        assert help_line(path).endswith(".")
