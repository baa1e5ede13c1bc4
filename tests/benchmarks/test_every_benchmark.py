"""Every benchmark of the command line's list: its line there, its help, and a run at its smallest size."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import MARKS, commands, main
from benchmarks.bench import ROOT

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
