"""Terminal tables of any width: every number is shown in full, keys are shortened or left out and it is said."""

import io
import itertools
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.compare.made_runs import make_run, rows
from titan_exp.compare.comparison import Comparison, compare
from titan_exp.compare.output.formats import text_table
from titan_exp.compare.output.pages import fit_keys, show
from titan_exp.compare.runs import select

KEYS = {
    "optimizer.lr": (0.0012345678, 0.01),
    "optimizer.betas": ([0.91, 0.951], [0.9, 0.95]),
    "model.context": (131072, 8192),
    "optimizer.eps": (1e-15, 1e-8),
    "data.dataset": ("a_very_long_name_of_a_corpus/with_a_version_2.1", "other_corpus/with_another_version_3"),
    "lr_schedule.decay": ("my_package.schedules.inverse_square_root", "linear"),
    "training.max_grad_norm": (0.123456789, 1.0),
    "lr_schedule.min_lr_ratio": (0.0123, 0.0),
}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Eight rows of two seeds, which differ in eight keys, one of them in a state of its own; many metrics."""
    runs = tmp_path_factory.mktemp("runs")
    for index, seed in itertools.product(range(8), range(2)):
        bits = [(index >> place) & 1 for place in range(3)]
        values = {key: choices[bits[place % 3]] for place, (key, choices) in enumerate(KEYS.items())}
        logged = rows(
            2.0 + index / 7 + seed / 31, speed=1234567.0 + 1000 * index, more={"objective/z_loss": 0.1 * index}
        )
        state = "failed" if (index, seed) == (7, 1) else "done"
        make_run(runs, {**values, "experiment.seed": seed}, metrics=logged, state=state, seconds=1e5 * (index + 1))
    return compare(select(["made"], runs))


def printed(found: Comparison, width: int, **also: bool) -> str:
    out = io.StringIO()
    show(found, Console(file=out, width=width, highlight=False), **also)
    return out.getvalue()


def values_in_full(found: Comparison, text: str) -> None:
    for row in text_table(found).rows:
        for cell in row.cells:
            assert cell.value in text
            assert cell.change in text


@pytest.mark.parametrize("width", [*range(30, 140, 10), 200, 300])
def test_every_number_is_shown_in_full(many: Comparison, width: int):
    text = printed(many, width)
    values_in_full(many, text)
    # A shortened text ends in a letter or a sign; a number never does.
    tables = text.partition("baseline:")[0]
    for word in re.findall(r"(\S*)…", tables):
        assert not re.fullmatch(r"[-+.\d\[,]+", word), word
    table = text_table(many)
    fitted = fit_keys(table, width, 0)
    for key, place in ((key, table.keys.index(key)) for key in fitted.table.keys if key in table.keys):
        shown = [row.keys[fitted.table.keys.index(key)] for row in fitted.table.rows]
        for value, before in zip(shown, (row.keys[place] for row in table.rows), strict=True):
            assert value == before or (value.endswith("…") and not before[0].isdigit())


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lines_fit_and_what_is_left_out_is_said(many: Comparison, width: int):
    text = printed(many, width)
    assert max(map(len, text.splitlines())) <= width
    joined = " ".join(text.split())
    assert f"At {width} columns the table is without" in joined
    assert "--csv, --markdown and the page show all keys." in joined
    table = text_table(many)
    # Rows that the other columns do not distinguish have a number, and a line with all their values.
    if "row 1:" in joined:
        last = zip(table.keys, table.rows[7].keys, strict=True)
        assert f"row 8: {' '.join(f'{name}={value}' for name, value in last)}" in joined


def test_a_pipe_and_a_wide_terminal_show_all(many: Comparison):
    for text in (printed(many, 300), printed(many, 80, every_key=True)):
        assert "At " not in text
        values_in_full(many, text)
        for row in text_table(many).rows:
            assert all(key in text for key in row.keys)


def test_columns_that_distinguish_no_row_go_first(many: Comparison):
    fitted = fit_keys(text_table(many), 60, 20)
    kept = [row.keys for row in fitted.table.rows]
    assert len(set(kept)) == 8
    assert fitted.left_out
    assert not fitted.labels


@pytest.mark.parametrize("beside", [30, 36, 40, 44])
def test_rows_stay_distinct(many: Comparison, beside: int):
    fitted = fit_keys(text_table(many), 60, beside)
    assert len({row.keys for row in fitted.table.rows}) == 8
    assert len(fitted.labels) in (0, 8)


def test_rows_without_room_for_keys_are_numbered(many: Comparison):
    fitted = fit_keys(text_table(many), 60, 50)
    assert fitted.table.keys[0] == "row"
    assert len(fitted.labels) == 8


@pytest.mark.parametrize("width", ["60", "80"])
def test_a_real_terminal(many: Comparison, tmp_path: Path, width: str):
    folders = [run.source for row in many.rows for run in row.runs]
    command = [sys.executable, "-m", "titan_exp", "compare", *folders, "--html=none"]
    leader, follower = pty.openpty()
    known = {**os.environ, "COLUMNS": width, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=follower, stderr=subprocess.STDOUT, cwd=tmp_path, env=known) as process:
        os.close(follower)
        output = b""
        while True:
            try:
                read = os.read(leader, 65536)
            except OSError:
                break
            if not read:
                break
            output += read
        assert process.wait(60) == 0
    os.close(leader)
    text = re.sub(r"\x1b\[[\d;]*m", "", output.decode())
    values_in_full(many, text)
    assert f"At {width} columns" in text
