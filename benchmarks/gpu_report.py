"""Report of a machine with a GPU: tests by room, speed beside torchtitan, planned and measured memory, doctor.

    make gpu                                    # within GPU_SECONDS=540; writes benchmarks/log/DATE-gpu.md
    python benchmarks/gpu_report.py --seconds 1200 --rows all,options
    python benchmarks/gpu_report.py --parts tests      # one of several calls, each with the whole budget
    python benchmarks/gpu_report.py --tiny      # the same on a CPU, at tiny shapes, to check the report

The report is written again after each part and while a part runs, so a kill leaves what was found. Without a network,
`make gpu-wheels` on another machine gathers the packages that the GPU machine lacks; see docs/guides/gpu.md.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu.memory import CASES, Peaks, table
from benchmarks.gpu.outcomes import VARIABLE, by_room
from benchmarks.gpu.packages import ROOT, environment, missing
from benchmarks.gpu.report import Report, Running, last_line, wait_for

SHARES = {"tests": 0.28, "rows": 0.47, "memory": 0.10, "doctor": 0.15}
"""Parts and their shares of the budget; chosen parts divide it in proportion."""
FINISH = 4.0
"""Seconds kept for ending processes and writing."""
NEEDED = ("torch", "omegaconf", "hydra", "pydantic", "pytest", "pytest_timeout", "xdist", "torchao", "rich")
"""Packages without which nothing runs."""
VERSUS = ROOT / "benchmarks" / "versus_torchtitan.py"
MEMORY = ROOT / "benchmarks" / "gpu" / "memory.py"
MACHINE = """
import platform, sys, torch
names = ["torch", "triton", "torchao", "torchtitan", "transformers"]
import importlib.metadata as m
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return "not installed"
print("- Python " + sys.version.split()[0] + ", " + ", ".join(f"{n} {version(n)}" for n in names))
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    print(f"- {torch.cuda.device_count()} x {p.name}, capability {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB")
    print(f"- CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
else:
    print("- no GPU: torch.cuda.is_available() is False")
"""


class GpuReport:
    """Parts of the report, within one budget."""

    def __init__(self, options: argparse.Namespace, began: float) -> None:
        self.tiny, self.rows, self.parts = options.tiny, options.rows, options.parts
        self._seconds, self._end = options.seconds, began + options.seconds - FINISH
        self._tests: list[str] = options.tests or test_files()
        name = time.strftime("%Y-%m-%d-%H%M") + ("-tiny" if self.tiny else "-gpu")
        name += "".join(f"-{part}" for part in self.parts if self.parts != list(SHARES))
        self.work = options.work or ROOT / "outputs" / f"gpu-{name}"
        self.work.mkdir(parents=True, exist_ok=True)
        self._environment = environment(NEEDED)
        if self.tiny:
            self._environment["CUDA_VISIBLE_DEVICES"] = ""
        title = f"{'Tiny run on a CPU' if self.tiny else 'GPU report'}, {time.strftime('%Y-%m-%d %H:%M')}"
        self.report = Report(options.log / f"{name}.md", title)

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
        return Running([sys.executable, *words], {**self._environment, **environment}, self.work / f"{log}.log")

    def _machine(self) -> None:
        lines = [f"- commit {commit()}"]
        versions = self._python("machine", "-c", MACHINE)
        wait_for([versions], min(60.0, self.left), lambda: None)
        lines.append((self.work / "machine.log").read_text(encoding="utf-8").strip())
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
            words += ["-p", "no:cacheprovider", "-p", "benchmarks.gpu.outcomes", "--rootdir", str(ROOT), *self._tests]
            running["tests"] = self._python("tests", *words, **{VARIABLE: str(outcomes)})
        if "rows" in self.parts:
            words, folder = [str(VERSUS), "--rows", self.rows], str(self.work / "plan")
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
        speed = self._python(heading.lower(), str(VERSUS), *words)

        def text() -> str:
            path = folder / "table.md"
            return path.read_text(encoding="utf-8") if path.is_file() else "No row has ended."

        wait_for([speed], seconds + FINISH / 2, lambda: self.report.part(heading, text()))
        if speed.ending:
            self.report.failed = True
            self.report.part(heading, f"{text()}\n\nThe comparison: {speed.ending}")

    def _memory(self, seconds: float) -> None:
        """Each case is planned while it is measured."""
        end, tiny = time.monotonic() + seconds, ["--tiny"] if self.tiny else []
        names = list(CASES)[: 2 if self.tiny else None]
        found: list[tuple[str, Peaks | str, Peaks | str]] = []

        def write() -> None:
            waiting = [name for name in names if name not in [row[0] for row in found]]
            notes = [f"Not run: {'; '.join(waiting)}."] if waiting else []
            self.report.part("Planned and measured memory", "\n\n".join([table(found), *notes]))

        for number, name in enumerate(names):
            left = end - time.monotonic()
            if left < 5:
                break
            plan = self._python(f"planned-{number}", str(MEMORY), "planned", name, *tiny)
            fact = self._python(f"measured-{number}", str(MEMORY), "measured", name, *tiny)
            wait_for([fact, plan], left, lambda: None)
            found.append((name, _peaks(plan), _peaks(fact)))
            self.report.failed |= any(isinstance(peaks, str) for peaks in found[-1][1:])
            write()
        if not found:
            self.report.part("Planned and measured memory", "Not run: the budget is spent.")

    def _doctor(self) -> None:
        # It prints its table at the end; most of its time are imports and FlexAttention's compilation.
        seconds = max(min(SHARES["doctor"] * self._seconds, self.left) / 4, 3)
        device = ["cluster.device=cpu"] if self.tiny else []
        words = [
            "-m",
            "titan_exp",
            "doctor",
            "--seconds",
            f"{seconds:.0f}",
            f"paths.runs={self.work / 'runs'}",
            *device,
        ]
        doctor = self._python("doctor", *words, COLUMNS="110")
        wait_for([doctor], min(3 * seconds + 60, self.left), lambda: None)
        text = (self.work / "doctor.log").read_text(encoding="utf-8", errors="replace").strip()
        self.report.failed |= bool(doctor.ending)
        note = f"\n\ndoctor: {doctor.ending}" if doctor.ending else ""
        self.report.part("doctor", f"```\n{text}\n```{note}")


def _peaks(running: Running) -> Peaks | str:
    """Peaks in the last line of a log, or the reason for which there are none."""
    return running.ending or Peaks(**json.loads(last_line(running.log)))


def commit() -> str:
    """Commit of this checkout; `unknown` where git or its folder is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def test_files() -> list[str]:
    """Test files that mention CUDA: collecting the others would take a fifth of the budget."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if re.search(r"mark\.cuda|\bDEVICES\b", path.read_text())]


def parts_named(words: str) -> list[str]:
    """Parts of a comma-separated list, in the report's order.

    Raises argparse.ArgumentTypeError about an unknown part.
    """
    if unknown := {*words.split(",")} - {*SHARES}:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; parts are {', '.join(SHARES)}")
    return [part for part in SHARES if part in words.split(",")]


def what_is_missing(*, tiny: bool) -> list[str]:
    """Reasons for which there can be no report here; installs the wheels.

    Raises RuntimeError if the wheels cannot be installed.
    """
    from titan_exp.config.machine.devices import visible_gpus

    if not tiny and not visible_gpus():
        return ["this machine shows no NVIDIA GPU (CUDA_VISIBLE_DEVICES may hide it)"]
    version = sys.version.split()[0]
    return [f"Python {version} cannot import {reason}" for reason in missing(NEEDED, environment(NEEDED))]


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540, help="budget for everything, 540 without")
    parser.add_argument("--parts", type=parts_named, default=list(SHARES), help=f"{','.join(SHARES)}; all without")
    parser.add_argument("--rows", default="all", help="rows of benchmarks/versus_torchtitan.py; all without")
    parser.add_argument("--tests", nargs="*", help="test files; all that mention CUDA without")
    parser.add_argument("--log", type=Path, default=ROOT / "benchmarks" / "log", help="folder of the report")
    parser.add_argument("--work", type=Path, help="folder of logs and results; outputs/gpu-DATE without")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU, to check the report itself")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Command line; returns 2 if no report can be made here, 1 if a part failed."""
    options, began = options_of(words), time.monotonic()
    try:
        reasons = what_is_missing(tiny=options.tiny)
    except RuntimeError as error:
        reasons = [str(error)]
    if reasons:
        print(
            "make gpu measures on a GPU, and cannot here:",
            *(f"  {line}" for line in reasons),
            sep="\n",
            file=sys.stderr,
        )
        print("  make gpu ARGS=--tiny checks the report on a CPU; docs/guides/gpu.md has the set-up.", file=sys.stderr)
        return 2
    gpu = GpuReport(options, began)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return gpu.run()
    except KeyboardInterrupt:
        gpu.report.part("Time", "Interrupted; what is above had been found by then.")
        return 130
    finally:
        print(f"Report: {gpu.report.path}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    os.chdir(ROOT)  # test files are named relative to it
    sys.exit(main())
