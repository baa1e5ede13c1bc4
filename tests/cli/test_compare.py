import json
import os
from pathlib import Path

import pytest

from tests.compare.made_runs import make_study
from titan_exp.cli.main import main


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_study(tmp_path / "runs", {0.001: [3.0, 3.1], 0.003: [2.5, 2.6]})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_a_study_is_compared(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["compare", "made"]) == 0
    out = capsys.readouterr().out
    assert "2 rows, 4 runs" in out
    assert out.endswith("page: runs/made/compare.html\n")
    assert (runs / "made/compare.html").read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in (runs / "made").iterdir() if not path.is_dir()) == ["compare.html"]
    (runs / "made/compare.html").unlink()
    (runs / "made/compare.html").mkdir()  # stands in for another user's runs: the page cannot be written
    assert main(["compare", "made"]) == 0
    again = capsys.readouterr().out
    assert again.startswith(out.partition("page: ")[0])
    assert "page: not written. --html runs/made/compare.html" in again


@pytest.mark.parametrize(
    "words",
    [
        ["--baseline", "lr=0.003"],
        ["--baseline=lr=0.003"],
        ["baseline=lr=0.003"],
        ["--baseline", "lr=0.003", "--paths.runs=runs"],
        ["paths.runs=runs", "baseline=lr=3e-3"],
    ],
)
def test_spellings_of_options(runs: Path, words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["compare", *words, "made", "--json", "--html=none"]) == 0
    assert json.loads(capsys.readouterr().out)["baseline"] == "lr=0.003"


def test_texts_are_printed_or_written(runs: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["compare", "--markdown", "made", "--csv=out/table.csv", "--latex", "out.tex"]) == 2
    assert "--latex=out.tex" in capsys.readouterr().err
    assert main(["compare", "--markdown", "made", "--csv=out/table.csv", "--html", "out/page.html"]) == 0
    done = capsys.readouterr()
    assert done.out.startswith("## made")
    assert done.err == "page: out/page.html\n"
    assert Path("out/table.csv").read_text().startswith("label,optimizer.lr,")
    assert Path("out/page.html").exists()
    assert not (runs / "made/compare.html").exists()


def test_a_pipe_is_written_to_and_not_replaced(runs: Path, capsys: pytest.CaptureFixture[str]):
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert main(["compare", "made", "--csv=pipe", "--html=none"]) == 0
        assert os.read(reader, 100).startswith(b"label,optimizer.lr,")
        assert Path("pipe").is_fifo()
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ([], "Name a study"),
        (["mde"], "Did you mean made"),
        (["made", "--metric", "loss"], "--metric: unknown flag. Did you mean --metrics?"),
        (["made", "--target", "low"], "target=low: must be a number"),
        (["made", "--baseline"], "--baseline needs a value"),
        (["made", "--baseline", "lr=7"], "matches no row"),
        (["made", "--group", "g"], "add --from-wandb"),
        (["made", "--from-wandb", "x"], "must be ENTITY/PROJECT"),
        (["made", "--html", "runs/made"], "Name a file, as in --html runs/made/compare.html"),
    ],
)
def test_mistakes_are_reported(runs: Path, words: list[str], answer: str, capsys: pytest.CaptureFixture[str]):
    assert main(["compare", *words]) == 2
    assert answer in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]):
    assert main(["compare", "--help"]) == 0
    out = capsys.readouterr().out
    for option in ("baseline", "metrics", "at", "target", "html", "from-wandb", "group", "to-wandb", "json", "latex"):
        assert f"  {option.replace('-', '_')}=" in out or f"  --{option}" in out
    assert "validation_loss" in out
