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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all: the first notebook trains the runs that the others find."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the client of the kernel, about how the two of them talk
@pytest.mark.xdist_group("notebooks")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell(place: Path, path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{Path(TITAN_EXP[0]).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    book = nbformat.read(path, as_version=4)
    shipped = [len(cell.get("outputs", [])) for cell in book.cells]
    client = NotebookClient(book, timeout=250, kernel_name="python3", resources={"metadata": {"path": str(place)}})
    client.execute()
    assert [len(cell.get("outputs", [])) for cell in book.cells] == shipped, "execute it and commit it"


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
