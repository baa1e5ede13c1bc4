"""Table of classes of transformers, docs/huggingface_models.md: its rows, and some of them found anew."""

import json
from typing import Any

import pytest

from tests.extensions.transformers.class_table import COLUMNS, PAGE, ROWS, cells_of, classes, mark, page, rows

transformers = pytest.importorskip("transformers")
KNOWN: dict[str, Any] = json.loads(ROWS.read_text())
FOUND = KNOWN["rows"]


def test_the_page_is_that_of_its_rows():
    assert PAGE.read_text() == page(FOUND, KNOWN["transformers"])


def test_every_row_is_that_of_a_class_with_a_reason_for_what_it_cannot():
    if transformers.__version__ == KNOWN["transformers"]:
        assert {*FOUND} <= {*classes()}
    assert all(cell for row in FOUND.values() for cell in cells_of(row))
    assert all(set(row) == {*COLUMNS} for row in FOUND.values())
    trained = [name for name, row in FOUND.items() if row["trains"] == "yes"]
    assert len(trained) >= 40


def test_no_class_is_wrong_in_a_layout_without_a_refusal():
    """What the check before a launch finds is a refusal; what differs is nothing that a rule let pass unseen."""
    crossed = {name: row["documents"] for name, row in FOUND.items() if row["documents"] == "documents see each other"}
    assert crossed == {}
    differing = {name for name, row in FOUND.items() for cell in cells_of(row) if cell.startswith("differs from")}
    assert differing == set()


@pytest.mark.night
@pytest.mark.skipif(transformers.__version__ != KNOWN["transformers"], reason="rows are of another version")
def test_rows_are_found_again():
    names = ("olmo3", "mixtral", "lfm2", "gemma2", "deepseek_v3")
    found = rows(names)
    for name in names:
        assert list(map(mark, cells_of(found[name]))) == list(map(mark, cells_of(FOUND[name]))), found[name]
