"""The notebooks, executed from their first cell: they train what they read, in seconds."""

import json
import os
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.journeys.command import REPOSITORY, TITAN_EXP

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


@pytest.mark.night  # 75 s; by day the shipped outputs are checked
@pytest.mark.filterwarnings("ignore")  # of the client of the kernel, about how the two of them talk
def test_they_run_from_their_first_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In one folder: all begin with the same six runs, which the first of them trains and the others find."""
    monkeypatch.setenv("PATH", f"{Path(TITAN_EXP[0]).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    for path in NOTEBOOKS:
        book = nbformat.read(path, as_version=4)
        shipped = [len(cell.get("outputs", [])) for cell in book.cells]
        where = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(book, timeout=250, kernel_name="python3", resources=where).execute()
        assert [len(cell.get("outputs", [])) for cell in book.cells] == shipped, f"execute {path.name} and commit it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_shipped_was_executed_and_names_no_place(path: Path):
    book = json.loads(path.read_text())
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not [output for cell in code for output in cell["outputs"] if output["output_type"] == "error"]
    assert path.stat().st_size < 60_000
    assert str(Path.home()) not in path.read_text() or str(Path.home()) == "/"
    assert "/tmp/" not in path.read_text()


def test_there_are_three():
    assert len(NOTEBOOKS) == 3
    assert shutil.which(TITAN_EXP[0])
