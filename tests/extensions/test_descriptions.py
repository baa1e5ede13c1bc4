"""Descriptions of the extensions of this repository, and the table of what they provide."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.parity.runs import train
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
    for what in ("families", "objectives", "sources", "parts", "generators", "resolvers", "reports"):
        assert all(load(path) is not None for path in getattr(found, what).values())
    alone = (found.asked, found.rules, found.commit, found.updates, found.exchange, found.evaluations, found.worlds)
    assert all(load(path) is not None for path in (*alone, found.sections, found.unfinished) if path)
    for path in (*found.verbs.values(), *found.observations.values()):
        assert load(path) is not None
        assert help_line(path).endswith(".")


class _Refused:
    """Modules of extensions beside what describes them, and checks a configuration."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.startswith("titan_exp.extensions.") and name.count(".") > 2:
            assert name.rpartition(".")[2] in {"extension", "config", "rules"}, f"{name} is imported"


def _refuse() -> None:
    assert not [name for name in sys.modules if name.startswith("titan_exp.extensions.") and name.endswith("part")]
    sys.meta_path.insert(0, _Refused())


def test_ranks_import_no_extension_that_their_run_does_not_ask_for(tmp_path: Path):
    assert len(train(tmp_path, "training.steps=1", mutate=_refuse).loss) == 1


@pytest.mark.parametrize("name", [name for name, found in OWN.items() if found.rules])
def test_rules_of_an_extension_may_be_imported_first(name: str):
    """Before the core's, which check a run by them."""
    code = f"import {OWN[name].rules} as own, titan_exp.rules as all; assert {{*own.RULES}} <= {{*all.every_rule()}}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_core_names_nothing_that_extensions_provide():
    """Neither their options, nor keys, families, studies and verbs."""
    package = FOLDER.parent
    rooms = [package, package.parent / "conf", package.parent / "sweeps"]
    files = [path for room in rooms for path in room.rglob("*") if path.suffix in (".py", ".yaml")]
    core = {path: path.read_text(encoding="utf-8") for path in files if not path.is_relative_to(FOLDER)}
    assert len(core) > 500
    for found in OWN.values():
        keys = {f"{group}.{key}" for group, path in found.groups.items() for key in asdict(load(path)())}
        verbs = {f"titan-exp {verb}" for verb in found.verbs}
        typed = {word for word in provided_words(found) if "=" in word and word.partition("=")[0] not in keys}
        for word in keys | verbs | typed:
            named = re.compile(rf"(?<![\w.]){re.escape(word)}(?!\w)")
            assert [path for path, text in core.items() if named.search(text)] == [], word
