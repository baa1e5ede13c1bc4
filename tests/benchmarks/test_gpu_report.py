"""`make gpu`: its report on a CPU from end to end, what a kill leaves of it, and its words where there is no GPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_packages as packages
from benchmarks import gpu_report
from benchmarks.__main__ import commands, main, options_of
from benchmarks.bench import ROOT, Running, cause_in, markdown, wait_for
from benchmarks.gpu_report import VARIABLE, GpuReport, Report, by_room
from benchmarks.memory import CASES, HEAD, Peaks, experiment_of, row
from tests.launch.fake_ranks import wait_until
from titan_exp.config import devices
from titan_exp.plan.prediction import check_supported


def test_without_a_gpu_it_says_so_at_once(monkeypatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    monkeypatch.setattr(devices, "present_gpus", lambda: 0)
    assert main(["gpu-report", "--log", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "gpu-report cannot run here:\n  this machine shows no NVIDIA GPU" in printed
    assert "make gpu ARGS=--tiny" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_before_anything_runs(monkeypatch, capsys, tmp_path: Path):
    (tmp_path / "needs_another.py").write_text("import another_package")
    monkeypatch.setattr(gpu_report, "NEEDED", ("pytest", "needs_another", "no_such_package"))
    monkeypatch.setattr(packages, "install", lambda: None)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["gpu-report", "--tiny"]) == 2
    printed = capsys.readouterr().err
    assert "cannot import needs_another: ModuleNotFoundError: No module named 'another_package'\n" in printed
    assert "cannot import no_such_package: ModuleNotFoundError" in printed
    assert "pytest" not in printed


def test_chosen_parts_divide_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(GpuReport, "left", 100.0)

    command = commands()["gpu-report"]

    def seconds(*words: str) -> dict[str, float]:
        given = ["--tiny", "--log", str(tmp_path), "--work", str(tmp_path), *words]
        options, _ = options_of(command, command.load(), given)
        report = GpuReport(options, time.monotonic())
        return {part: round(report.seconds_of(part), 1) for part in report.parts}

    assert seconds() == {"tests": 28.0, "rows": 65.3, "memory": 40.0, "doctor": 100.0}, "of what is left before each"
    assert seconds("--parts", "tests") == {"tests": 100.0}
    assert seconds("--parts", "doctor,memory") == {"memory": 40.0, "doctor": 100.0}
    with pytest.raises(SystemExit):
        seconds("--parts", "tests,speed")
    assert "unknown speed; parts are tests, rows, memory, doctor" in capsys.readouterr().err


def test_every_file_with_tests_for_cuda_is_run():
    found = {ROOT / name for name in gpu_report.test_files()}
    words = ("pytest.mark.cuda", "interpreted import DEVICES", "DEVICES,")
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if any(word in path.read_text() for word in words)}
    assert marked <= found
    assert len(found) > 8


TESTS = """
import pytest

def test_good():
    pass

def test_bad():
    assert 1 == 2, "one is not two"

def test_elsewhere():
    pytest.skip("needs a CUDA GPU")

@pytest.fixture
def broken():
    raise OSError("no disk")

def test_set_up(broken):
    pass
"""


@pytest.mark.parametrize("workers", [[], pytest.param(["-n", "2"], marks=pytest.mark.night)])
def test_outcomes_are_written_as_they_come_and_listed_by_room(tmp_path: Path, workers: list[str]):
    for room in ("ops", "trainer"):
        (tmp_path / "tests" / room).mkdir(parents=True)
        (tmp_path / "tests" / room / f"test_{room}.py").write_text(TESTS)
    (tmp_path / "tests" / "ops" / "test_broken.py").write_text("import no_such_package")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    outcomes = tmp_path / "outcomes.jsonl"
    given = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**given, "PYTHONPATH": str(ROOT), VARIABLE: str(outcomes)}
    words = ["-m", "pytest", "-q", "-p", "benchmarks.gpu_report", "-p", "no:cacheprovider", *workers, "tests"]
    words += ["--continue-on-collection-errors"]
    subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment, check=False, capture_output=True, timeout=120
    )
    text = by_room(outcomes)
    assert "| ops | 1 | 3 | 1 | 0 | 0 |" in text
    assert "| trainer | 1 | 2 | 1 | 0 | 0 |" in text
    assert text.count("- `tests/ops/test_broken.py`: ModuleNotFoundError: No module named 'no_such_package'") == 1
    assert "- `tests/trainer/test_trainer.py::test_bad`: AssertionError: one is not two assert 1 == 2" in text
    assert "- `tests/trainer/test_trainer.py::test_set_up`: OSError: no disk" in text
    assert "Skipped because: needs a CUDA GPU." in text


def test_tests_that_have_not_run_are_counted_by_room(tmp_path: Path):
    lines = [{"collected": {"ops": 3, "trainer": 2}}]
    lines += [{"test": "tests/ops/test_a.py::test_b", "outcome": "passed", "seconds": 2.0, "message": ""}]
    (tmp_path / "outcomes").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text = by_room(tmp_path / "outcomes")
    assert "| ops | 1 | 0 | 0 | 2 | 2 |\n| trainer | 0 | 0 | 0 | 2 | 0 |" in text


def test_parts_are_replaced_in_place(tmp_path: Path):
    report = Report(tmp_path / "log" / "report.md", "A title")
    report.part("Tests", "| none |")
    report.part("Speed", "soon")
    report.part("Tests", "| all |")
    assert report.path.read_text() == "# A title\n\n## Tests\n\n| all |\n\n## Speed\n\nsoon\n"
    assert [path.name for path in report.path.parent.iterdir()] == ["report.md"]


def command_of(process: str) -> str:
    """Command of a process; nothing of one that is gone, or killed and still listed."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


def test_a_process_is_ended_with_its_children_at_its_limit(tmp_path: Path):
    script = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '99']); print(p.pid, flush=True); time.sleep(99)"
    )
    running = Running([sys.executable, "-c", script], os.environ, tmp_path / "log")
    written: list[str] = []
    wait_until(lambda: bool((tmp_path / "log").read_text()))
    wait_for([running], 3, lambda: written.append("progress"))
    assert running.ending == "ended when its share of the budget was spent"
    assert written
    child = (tmp_path / "log").read_text().strip()
    wait_until(lambda: "sleep" not in command_of(child))
    failed = Running([sys.executable, "-c", "raise SystemExit('no weights')"], os.environ, tmp_path / "other")
    wait_for([failed], 30)
    assert failed.ending == "exit code 1; no weights"


def test_the_cause_of_a_failure_is_the_first_line_of_its_last_exception():
    log = """
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'weights'

During handling of the above exception, another exception occurred:

[rank0]: Traceback (most recent call last):
[rank0]:   File "a.py", line 3, in <module>
[rank0]:     run()
[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
[rank0]: See the documentation
[rank0]:[W1128] Warning: destroy_process_group() was not called
"""
    assert cause_in(log) == "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert cause_in("loading\nno weights\n\n") == "no weights"
    assert cause_in("") == "nothing in its log"


@pytest.mark.parametrize("name", CASES)
def test_memory_cases_can_be_planned(name: str):
    check_supported(experiment_of(name, tiny=False))


def test_the_table_of_memory_has_errors_in_percent_and_reasons():
    peaks = Peaks(66 * 2**30, 80 * 2**30), Peaks(60 * 2**30, 80 * 2**30)
    rows = ("a", *peaks), ("b", "exit code 1 | no", peaks[1]), ("c", peaks[0], Peaks(None, None))
    text = markdown(HEAD, [row(*cells) for cells in rows])
    assert "| a | 66.00 / 60.00 (+10.0%) | 80.00 / 80.00 (+0.0%) |" in text
    assert "| b | failed: exit code 1 / no | |" in text
    assert "| c | 66.00 / – | 80.00 / – |" in text


def test_wheels_are_installed_once_for_this_machine(tmp_path: Path):
    source = tmp_path / "source"
    (source / "tiny_wheel").mkdir(parents=True)
    (source / "tiny_wheel" / "__init__.py").write_text("answer = 42\n")
    built = "[build-system]\nrequires = ['hatchling']\nbuild-backend = 'hatchling.build'\n"
    (source / "pyproject.toml").write_text(f"{built}[project]\nname = 'tiny_wheel'\nversion = '1'\n")
    assert packages.install(tmp_path / "wheels", tmp_path / "packages") is None
    words = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "wheels"), str(source)]
    subprocess.run([sys.executable, *words], check=True, capture_output=True, timeout=100)
    folder = packages.install(tmp_path / "wheels", tmp_path / "packages")
    assert folder is not None
    installed = (folder / "tiny_wheel" / "__init__.py").stat()
    assert packages.install(tmp_path / "wheels", tmp_path / "packages") == folder
    assert (folder / "tiny_wheel" / "__init__.py").stat() == installed, "not installed again"
    (tmp_path / "wheels" / "broken-1-py3-none-any.whl").write_text("no archive")
    with pytest.raises(RuntimeError, match="cannot be installed"):
        packages.install(tmp_path / "wheels", tmp_path / "packages")


def start(tmp_path: Path, seconds: int) -> "subprocess.Popen[str]":
    words = ["--tiny", "--seconds", str(seconds), "--rows", "8b_bf16_eager", "--log", str(tmp_path / "log")]
    words += ["--work", str(tmp_path / "work"), "--tests", "tests/ops/test_sdpa.py"]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "gpu-report", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.night  # the real command: tests, rows, steps, doctor
@pytest.mark.skipif(not (ROOT / ".peer" / "torchtitan").is_dir(), reason="torchtitan is not installed: make peer")
@pytest.mark.timeout(900)
def test_the_whole_report_on_a_cpu(tmp_path: Path):
    process = start(tmp_path, 600)
    output, _ = process.communicate(timeout=800)
    (report,) = (tmp_path / "log").iterdir()
    text = report.read_text()
    assert process.returncode == 0, output + text
    headings = re.findall("^## (.*)$", text, re.M)
    expected = ["Machine", "Tests", "Planned rows", "Speed", "Planned and measured memory", "doctor", "Time"]
    assert headings == expected
    assert re.search(r"\| ops \| 0 \| 0 \| [1-9]\d* \| 0 \|", text)
    assert re.search(r"\| 8B×8 bf16 eager \| [\d,]+ \| [\d,]+ \|", text)
    assert len(re.findall(r"\d / – \|", text)) == 4, "planned beside what a CPU cannot measure"
    losses = [
        json.loads(line)["losses"] for line in (tmp_path / "work" / "speed" / "rows.jsonl").read_text().splitlines()
    ]
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)


@pytest.mark.night
def test_a_kill_leaves_a_readable_report_and_no_process(tmp_path: Path):
    process = start(tmp_path, 300)
    deadline = time.monotonic() + 200
    while not list((tmp_path / "work").glob("tests.log")) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    (report,) = (tmp_path / "log").glob("*.md")
    text = report.read_text()
    assert "## Machine" in text
    assert text.rstrip().endswith("Interrupted; what is above had been found by then.")
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert left == ""
