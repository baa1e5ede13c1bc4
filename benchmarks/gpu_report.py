"""Report of a machine with a GPU, and the pytest plugin that writes its tests' outcomes as they come.

The plugin appends every outcome as a flushed JSON line, so that a killed run leaves what it found.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import (
    ROOT,
    CannotRun,
    Output,
    Running,
    benchmark,
    markdown,
    option,
    temporary,
    wait_for,
    write_whole,
)
from benchmarks.gpu_packages import gpu_environment, missing
from benchmarks.memory import CASES

VARIABLE = "GPU_REPORT_OUTCOMES"
"""Environment variable with the path of the outcomes."""
SHARES = {"tests": 0.28, "rows": 0.47, "memory": 0.10, "doctor": 0.15}
"""Parts and their shares of the budget; chosen parts divide it in proportion."""
FINISH = 4.0
"""Seconds kept for ending processes and writing."""
NEEDED = ("torch", "omegaconf", "hydra", "pydantic", "pytest", "pytest_timeout", "xdist", "torchao", "rich")
"""Packages without which nothing runs."""
VERSUS = ("-m", "benchmarks", "versus")
LOG = Path("benchmarks", "log")
MACHINE = "import torch; from benchmarks.bench import machine; print(machine())"


class Report:
    """Report with parts in the order of their first mention."""

    def __init__(self, path: Path, title: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._title = path, title
        self._parts: dict[str, str] = {}
        self.failed = False
        """True if a part failed."""

    def part(self, heading: str, text: str) -> None:
        """Write or replace a part."""
        self._parts[heading] = text.strip()
        write_whole(self.path, self.text)

    @property
    def text(self) -> str:
        """Its Markdown."""
        parts = [f"## {name}\n\n{content}" for name, content in self._parts.items()]
        return "\n\n".join([f"# {self._title}", *parts]) + "\n"


class GpuReport:
    """Parts of the report, within one budget."""

    def __init__(self, options: "ReportOptions", began: float) -> None:
        self.tiny, self.rows, self.parts = options.tiny, options.rows, options.parts
        self._seconds, self._end = options.seconds, began + options.seconds - FINISH
        self._tests: list[str] = [*options.tests] or test_files()
        name = time.strftime("%Y-%m-%d-%H%M") + ("-tiny" if self.tiny else "-gpu")
        name += "".join(f"-{part}" for part in self.parts if self.parts != tuple(SHARES))
        self.work = ROOT / options.work if options.work else ROOT / "outputs" / f"gpu-{name}"
        self.work.mkdir(parents=True, exist_ok=True)
        self._environment = gpu_environment(NEEDED)
        if self.tiny:
            self._environment["CUDA_VISIBLE_DEVICES"] = ""
        title = f"{'Tiny run on a CPU' if self.tiny else 'GPU report'}, {time.strftime('%Y-%m-%d %H:%M')}"
        self.report = Report(ROOT / options.log / f"{name}.md", title)

    @property
    def left(self) -> float:
        """Seconds left."""
        return max(self._end - time.monotonic(), 0.0)

    def seconds_of(self, part: str) -> float:
        """Seconds left for a part, of those from it on."""
        later = list(SHARES)[list(SHARES).index(part) :]
        shares = sum(SHARES[name] for name in later if name in self.parts or name == part)
        return self.left * SHARES[part] / shares

    def run(self) -> int:
        """Run the parts, the most important first; returns 1 if one failed."""
        self._machine()
        if {"tests", "rows"} & {*self.parts}:
            self._tests_and_caches()
        if "rows" in self.parts:
            self._speed("Speed", self.rows, self.seconds_of("rows"))
        if "memory" in self.parts:
            self._memory(self.seconds_of("memory"))
        if "doctor" in self.parts:
            self._doctor()
        if "rows" in self.parts and not self.tiny and self.rows == "all" and self.left > 45:
            self._speed("Options", "options", self.left)
        spent = self._seconds - FINISH - self.left
        self.report.part("Time", f"{spent:.0f} s of {self._seconds:.0f} s. Logs: `{self.work}`.")
        return 1 if self.report.failed else 0

    def _python(self, log: str, *words: str, **environment: str) -> Running:
        return Running([sys.executable, *words], {**self._environment, **environment}, self.work / f"{log}.log", ROOT)

    def _machine(self) -> None:
        versions = self._python("machine", "-c", MACHINE)
        wait_for([versions], min(60.0, self.left))
        lines = [f"- {versions.text.strip()}"]
        if not self.tiny:
            query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.sm", "--format=csv,noheader"]
            done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
            lines.append(f"- nvidia-smi: {done.stdout.strip() or done.stderr.strip()}")
        self.report.part("Machine", "\n".join(lines))

    def _tests_and_caches(self) -> None:
        """Tests, and beside them the compile caches of the rows and the planner's table, which need no idle GPU."""
        limit, outcomes = self.seconds_of("tests"), self.work / "outcomes.jsonl"
        running: dict[str, Running] = {}
        if "tests" in self.parts:
            # A file that cannot be imported there costs its own tests only.
            words = ["-m", "pytest", "-m", "cuda", "-q", "-n", "4", "--continue-on-collection-errors"]
            words += ["-p", "no:cacheprovider", "-p", "benchmarks.gpu_report", "--rootdir", str(ROOT), *self._tests]
            running["tests"] = self._python("tests", *words, **{VARIABLE: str(outcomes)})
        if "rows" in self.parts:
            words, folder = [*VERSUS, "--rows", self.rows], str(self.work / "plan")
            running["plan"] = self._python("plan", *words, "--plan", "--output", folder)
            if not self.tiny:
                words += ["--rounds", "0", "--seconds", str(limit), "--output", str(self.work / "caches")]
                running["caches"] = self._python("caches", *words)

        def write() -> None:
            if tests := running.get("tests"):
                # Failures, whose exit code is 1, are in the table.
                notes = [f"The tests: {tests.ending}."] if tests.ending and tests.process.returncode != 1 else []
                self.report.part("Tests", "\n\n".join([by_room(outcomes), *notes]))

        wait_for([*running.values()], limit, write)
        self.report.failed |= "tests" in running and bool(running["tests"].ending)
        if plan := running.get("plan"):
            found = self.work / "plan" / "plan.md"
            text = found.read_text(encoding="utf-8") if found.is_file() else f"The planner: {plan.ending}."
            self.report.part("Planned rows", text)

    def _speed(self, heading: str, rows: str, seconds: float) -> None:
        if seconds < 10:
            self.report.part(heading, "Not run: the budget is spent.")
            return
        folder = self.work / heading.lower()
        words = ["--rows", rows, "--seconds", f"{seconds:.0f}", "--output", str(folder)]
        words += ["--tiny", "--rounds", "1", "--warmup", "2", "--steps", "2"] if self.tiny else []
        words += ["--planned", str(self.work / "plan" / "plan.json")]
        words += ["--fill-caches", "0"] if not self.tiny and heading == "Speed" else []  # they are filled
        words += ["--rounds", "1"] if heading == "Options" else []
        speed = self._python(heading.lower(), *VERSUS, *words)

        def text() -> str:
            path = folder / "table.md"
            return path.read_text(encoding="utf-8") if path.is_file() else "No row has ended."

        wait_for([speed], seconds + FINISH / 2, lambda: self.report.part(heading, text()))
        if speed.ending:
            self.report.failed = True
            self.report.part(heading, f"{text()}\n\nThe comparison: {speed.ending}")

    def _memory(self, seconds: float) -> None:
        words = ["--tiny", "--only", "2 sequences"] if self.tiny else []
        memory = self._python("memory", "-m", "benchmarks", "rank-memory", *words)

        def write() -> None:
            lines = [line for line in memory.text.splitlines() if line.startswith("|")]
            waiting = [name for name in CASES if not any(name in line for line in lines)]
            notes = [f"Not run: {'; '.join(waiting)}."] if waiting else []
            self.report.part("Planned and measured memory", "\n\n".join(["\n".join(lines), *notes]))

        wait_for([memory], seconds, write)
        self.report.failed |= bool(memory.ending) or "| failed: " in memory.text

    def _doctor(self) -> None:
        # It prints its table at the end; most of its time are imports and FlexAttention's compilation.
        seconds = max(min(SHARES["doctor"] * self._seconds, self.left) / 4, 3)
        device = ["cluster.device=cpu"] if self.tiny else []
        words = ["doctor", "--seconds", f"{seconds:.0f}", f"paths.runs={self.work / 'runs'}", *device]
        doctor = self._python("doctor", "-m", "titan_exp", *words, COLUMNS="110")
        wait_for([doctor], min(3 * seconds + 60, self.left))
        text = doctor.text.strip()
        self.report.failed |= bool(doctor.ending)
        note = f"\n\ndoctor: {doctor.ending}" if doctor.ending else ""
        self.report.part("doctor", f"```\n{text}\n```{note}")


def test_files() -> list[str]:
    """Test files that mention CUDA: collecting the others would take a fifth of the budget."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if re.search(r"mark\.cuda|\bDEVICES\b", path.read_text())]


def parts_named(words: str) -> tuple[str, ...]:
    """Parts of a comma-separated list, in the report's order.

    Raises argparse.ArgumentTypeError about an unknown part.
    """
    if unknown := {*words.split(",")} - {*SHARES}:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; parts are {', '.join(SHARES)}")
    return tuple(part for part in SHARES if part in words.split(","))


def what_is_missing(*, tiny: bool) -> list[str]:
    """Reasons for which there can be no report here; installs the wheels.

    Raises RuntimeError if the wheels cannot be installed.
    """
    from titan_exp.config.devices import visible_gpus

    if not tiny and not visible_gpus():
        return ["this machine shows no NVIDIA GPU (CUDA_VISIBLE_DEVICES may hide it)"]
    version = sys.version.split()[0]
    return [f"Python {version} cannot import {reason}" for reason in missing(NEEDED, gpu_environment(NEEDED))]


@dataclass(frozen=True)
class ReportOptions:
    seconds: float = option(540.0, "budget for everything", smallest=600.0)
    parts: tuple[str, ...] = option(tuple(SHARES), "comma-separated parts", smallest=("memory",), parse=parts_named)
    rows: str = option("all", "rows of the comparison with torchtitan, as of `versus --rows`")
    tests: tuple[str, ...] = option((), "test files; all that mention CUDA without")
    log: Path = option(LOG, "folder of the report", smallest=temporary)
    work: Path | None = option(None, "folder of logs and results; outputs/gpu-DATE without", smallest=temporary)
    tiny: bool = option(False, "tiny shapes on a CPU, to check the report itself", smallest=True)


@benchmark
def gpu_report(options: ReportOptions, out: Output) -> int:
    """Report of a machine with a GPU: tests by room, speed beside torchtitan, planned and measured memory, doctor.

    make gpu                                 # within GPU_SECONDS=540; writes benchmarks/log/DATE-gpu.md
    make gpu ARGS='--rows all,options'
    make gpu ARGS='--parts tests'            # one of several calls, each with the whole budget
    make gpu ARGS=--tiny                     # the same on a CPU, at tiny shapes, to check the report

    The report is written again after each part and while a part runs, so a kill leaves what was found. Relative paths
    begin at the root of the checkout. Without a network, `make gpu-wheels` on another machine gathers the packages that
    the GPU machine lacks; see docs/guides/gpu.md. Exits with 1 if a part failed.
    """
    began = time.monotonic()
    try:
        reasons = what_is_missing(tiny=options.tiny)
    except RuntimeError as error:
        reasons = [str(error)]
    if reasons:
        raise CannotRun(*reasons, "make gpu ARGS=--tiny checks the report on a CPU; docs/guides/gpu.md has the set-up")
    gpu = GpuReport(options, began)
    try:
        return gpu.run()
    except KeyboardInterrupt:
        gpu.report.part("Time", "Interrupted; what is above had been found by then.")
        return 130
    finally:
        out.say(f"{gpu.report.text}\nReport: {gpu.report.path}")


def pytest_collection_finish(session: Any) -> None:
    """Append the number of tests by room; of pytest-xdist's workers the first does."""
    if session.items and os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        _append({"collected": Counter(_room(item.nodeid) for item in session.items)})


def pytest_collectreport(report: Any) -> None:
    """Append a file that cannot be imported as a failed test."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        # Lines of exceptions begin with E; the last exception is the reason.
        found = re.findall(r"^(?!E ).*\nE +(.*)", str(report.longrepr), re.M) or [str(report.longrepr)]
        _append({"test": report.nodeid, "outcome": "failed", "seconds": 0.0, "message": found[-1][:400]})


def pytest_runtest_logreport(report: Any) -> None:
    """Append a test's outcome; under pytest-xdist the controller does."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    finished = report.when == "call" or (report.when == "setup" and report.outcome != "passed")
    if not finished and report.outcome != "failed":
        return
    message = ""
    if report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = str(crash.message if crash is not None else report.longrepr)[:400]
    elif report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        message = str(report.longrepr[2]).removeprefix("Skipped: ")
    seconds = round(report.duration, 2)
    _append({"test": report.nodeid, "outcome": report.outcome, "seconds": seconds, "message": message})


def _append(line: dict[str, Any]) -> None:
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _room(test: str) -> str:
    return test.partition("::")[0].split("/")[1 if "/" in test else 0]


def by_room(path: Path) -> str:
    """Markdown table by room: tests that passed, failed, were skipped and have not run, and seconds; failures below."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    collected = Counter[str]()
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        collected.update(line.get("collected", {}))
        if "test" in line:  # every worker tells of a file that cannot be imported
            found.setdefault((line["test"], line["outcome"]), line)
    rows: list[list[str]] = []
    for room in sorted({*collected, *(_room(test) for test, _ in found)}):
        here = [line for line in found.values() if _room(line["test"]) == room]
        counts = [sum(line["outcome"] == outcome for line in here) for outcome in ("passed", "failed", "skipped")]
        ran = {line["test"] for line in here if "::" in line["test"]}
        seconds = sum(line["seconds"] for line in here)
        numbers = [*counts, max(collected[room] - len(ran), 0)]
        rows.append([room, *map(str, numbers), f"{seconds:.0f}"])
    failures = [f"- `{line['test']}`: {_one_line(line)}" for line in found.values() if line["outcome"] == "failed"]
    reasons = sorted({_one_line(line) for line in found.values() if line["outcome"] == "skipped"})
    skipped = [f"Skipped because: {'; '.join(reasons)}."] if reasons else []
    return "\n\n".join(
        filter(
            None,
            [
                markdown(["room", "passed", "failed", "skipped", "not run", "seconds"], rows),
                "\n".join(failures),
                *skipped,
            ],
        )
    )


def _one_line(line: dict[str, Any]) -> str:
    return " ".join(line["message"].split())
