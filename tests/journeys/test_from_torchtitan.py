"""Tables of the page for users of torchtitan: keys that exist, and every option of the installed torchtitan."""

import dataclasses
import importlib
import re
import sys
from typing import Any

import pytest

from tests.journeys.command import REPOSITORY
from titan_exp.config.schema.schema import value_keys

PAGE = REPOSITORY / "docs" / "tutorials" / "from-torchtitan.md"
PEER = REPOSITORY / ".peer"
ROW = re.compile(r"^\| (?P<theirs>[^|]+) \| (?P<ours>[^|]+) \|[^|]*\|$", re.M)
NAME = re.compile(r"`([^`]+)`")


def rows() -> dict[str, list[tuple[list[str], str]]]:
    """Rows below `Every option` by heading: torchtitan's names, and the cell of ours."""
    sections = re.split(r"^### (.+)$", PAGE.read_text().partition("\n## Every option\n")[2], flags=re.M)[1:]
    tables = [text.partition("| torchtitan | titan_exp | |\n|---|---|---|\n")[2] for text in sections[1::2]]
    tables = [re.split(r"\n\n", table)[0] for table in tables]
    return {
        heading: [(NAME.findall(row["theirs"]), row["ours"].strip()) for row in ROW.finditer(table)]
        for heading, table in zip(sections[::2], tables, strict=True)
    }


def test_our_column_names_keys():
    cells = [ours for found in rows().values() for _, ours in found]
    keys = [key for cell in cells for key in NAME.findall(cell)]
    assert sorted(set(keys) - set(value_keys())) == []
    assert [cell for cell in cells if cell != "–" and not NAME.findall(cell)] == []
    assert len(keys) > 100


def options(config: Any, prefix: str = "") -> list[str]:
    """Dotted names of a dataclass's fields."""
    found = []
    for field in dataclasses.fields(config):
        nested = dataclasses.is_dataclass(field.type)
        found += options(field.type, f"{prefix}{field.name}.") if nested else [prefix + field.name]
    return found


@pytest.mark.skipif(not (PEER / "torchtitan").is_dir(), reason="torchtitan is not installed: make peer")
def test_every_option_of_torchtitan_has_a_row(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(PEER)])
    core = importlib.import_module("torchtitan.config.job_config").JobConfig
    semi_sync = importlib.import_module("torchtitan.components.ft.config.job_config").JobConfig
    listed = [f"{heading}.{name}" for heading, found in rows().items() for names, _ in found for name in names]
    sections = {name.partition(".")[0] for name in options(core)}
    listed = [name for name in listed if name.partition(".")[0] in sections]
    assert sorted(listed) == sorted({*options(core), *options(semi_sync)})
