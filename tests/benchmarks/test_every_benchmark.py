"""Every benchmark of the command line's list: its line there, its help, and a run at its smallest size."""

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.__main__ import MARKS, Command, commands, main, options_of
from benchmarks.bench import ROOT, Output, option

NAMES = [name for name, command in commands().items() if command.measures]


def test_the_list_has_every_marked_function_and_its_sentence(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, command in commands().items():
        assert re.search(rf"^  {name} +{re.escape(command.sentence)}$", printed, re.M)
        assert command.sentence.endswith("."), name
    trees = [ast.parse(path.read_text()) for path in (ROOT / "benchmarks").rglob("*.py")]
    marks = [mark for tree in trees for node in ast.walk(tree) for mark in getattr(node, "decorator_list", [])]
    assert len([mark for mark in marks if ast.unparse(mark) in MARKS]) == len(commands()), "two share a name"
    assert main(["no-such-benchmark"]) == 2
    assert "unknown benchmark no-such-benchmark" in capsys.readouterr().err


def test_tables_are_written_as_printed_or_with_all_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("found.md", "found.json"):
        out = Output(tmp_path / name)
        table = out.table({"loop": "", "tokens/s": ",.0f", "ratio": ".2f"}, "Loops")
        table.add("ours", 1234.5678, None)
        out.close()
    printed = capsys.readouterr().out
    assert "Loops\n\n| loop | tokens/s | ratio |\n|---|--:|--:|\n| ours | 1,235 | – |\n" in printed
    assert printed == 2 * (tmp_path / "found.md").read_text()
    assert re.match(r"\d{4}-\d\d-\d\d, commit .*, load .*, torch \d", printed), "hardware and versions come first"
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tables"] == [{"title": "Loops", "rows": [{"loop": "ours", "tokens/s": 1234.5678, "ratio": None}]}]


@dataclass(frozen=True)
class Options:
    """Options of a benchmark."""

    steps: int = option(10, "steps", smallest=1)
    rates: tuple[float, ...] = option((0.5, 1.0), "rates", smallest=lambda: (0.5,))
    folder: Path | None = option(None, "where to write")
    words: tuple[str, ...] = option((), "overrides", smallest=("a=1",), positional=True)


def measure(options: Options, out: Output) -> None:
    """Measure nothing."""


def test_options_are_fields_and_smallest_gives_way_to_what_is_typed():
    def given(*words: str) -> Options:
        return options_of(Command("measure", "", "", "", True), measure, words)[0]

    assert given() == Options()
    assert given("--rates", "2", "3", "--folder", "here", "--steps=4") == Options(4, (2.0, 3.0), Path("here"))
    assert given("b=1", "c=2").words == ("b=1", "c=2")
    assert given("--smallest") == Options(1, (0.5,), None, ("a=1",))
    assert given("--smallest", "--steps", "3", "b=1") == Options(3, (0.5,), None, ("b=1",))


@pytest.mark.night
@pytest.mark.parametrize("name", commands())
def test_help_has_every_option(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert done.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: python -m benchmarks {name}")
    assert ("--smallest" in printed) == (name in NAMES)


@pytest.mark.night
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_at_its_smallest(name: str, tmp_path: Path):
    path = os.pathsep.join([str(ROOT), str(ROOT / ".peer")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks", name, "--smallest", "--write", str(tmp_path / "written.md")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1400, check=False
    )
    if done.returncode == 2 and f"{name} cannot run here:" in done.stderr:
        pytest.skip(done.stderr.partition("cannot run here:")[2].strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\|---.*\n\|.*\|$", done.stdout, re.M), "a table with a row\n" + done.stdout
    assert "\n|---" in (tmp_path / "written.md").read_text()
