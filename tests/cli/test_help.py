"""`titan-exp help TOPIC` and the discovery of verbs."""

import io
import sys

import pytest

from titan_exp.cli.help import guides, tutorials
from titan_exp.cli.main import main, verbs


def test_a_guide_is_printed_as_it_is_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]):
    assert main(["help", "sweeps-and-slurm"]) == 0
    assert capsys.readouterr().out == guides()["sweeps-and-slurm"].read_text(encoding="utf-8")


def test_characters_that_a_locale_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch):
    screen = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["help", "optimizers"]) == 0
    text = guides()["optimizers"].read_text(encoding="utf-8")
    assert screen.buffer.getvalue() == text.encode("latin-1", "replace") != text.encode()


def test_a_guide_is_formatted_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["help", "sweeps-and-slurm"]) == 0
    assert "\x1b[" in screen.getvalue()
    assert "```" not in screen.getvalue()


def test_topics_are_listed_and_misspelt_ones_suggested(capsys: pytest.CaptureFixture[str]):
    assert main(["help"]) == 0
    assert "sweeps-and-slurm" in capsys.readouterr().out
    assert main(["help", "sweep-and-slurm"]) == 2
    assert "sweeps-and-slurm" in capsys.readouterr().err


def test_tutorials_are_listed_and_printed(capsys: pytest.CaptureFixture[str]):
    assert {"ablation", "from-torchtitan"} <= tutorials().keys()
    assert main(["help"]) == 0
    listed = capsys.readouterr().out.partition("\nTutorials\n")[2].partition("\n\n")[0]
    assert listed.strip().split(", ") == [*tutorials()]
    assert main(["help", "ablation"]) == 0
    assert capsys.readouterr().out == tutorials()["ablation"].read_text(encoding="utf-8")


def test_every_verb_is_a_module_with_a_line_of_help(capsys: pytest.CaptureFixture[str]):
    assert {"train", "sweep", "plan", "status", "tokenize", "help"} <= set(verbs())
    assert "shell" not in verbs()
    assert all(verbs().values())
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb:<10} {text}" in out for verb, text in verbs().items())
