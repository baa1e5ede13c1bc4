"""Alternating runs of both sides (A B B A), each in a fresh process, within a time budget."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import cause_in
from benchmarks.versus.job import Job
from benchmarks.versus.results import Results, sides_of
from titan_exp.config.machine.devices import ALLOC_CONF, EXPANDABLE

SCRIPT = Path(__file__).resolve().parents[1] / "versus_torchtitan.py"
UNKNOWN_SECONDS = 60.0
"""Estimated seconds of a side's first process: imports, weights, compilation, steps."""


class Budget:
    """Wall-clock budget in seconds; None is unlimited."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left."""
        return float("inf") if self._end is None else self._end - time.monotonic()


@dataclasses.dataclass(frozen=True)
class Session:
    """Runs of jobs within a budget; logs are kept beside the results, weights in the cache."""

    budget: Budget
    """Time for everything."""
    results: Results
    """Collected results."""
    cache: Path
    """Folder of initial weights."""
    left_out: Collection[tuple[str, str]] = ()
    """Rows and sides that do not run."""

    def sides(self, job: Job) -> list[str]:
        """Sides of a row that run."""
        return [side for side in sides_of(job.row) if (job.row, side) not in self.left_out]

    def run(self, jobs: Sequence[Job], rounds: int) -> None:
        """Run every row once before any row again, so that a budget costs repetitions first.

        A row's sides swap their order in every round. A row that would not fit into the budget is left out with a note.
        """
        slowest: dict[str, float] = {}
        weights: dict[tuple[str, ...], str] = {}
        for number in range(1, rounds + 1):
            for job in jobs:
                sides = self.sides(job)[:: 1 if number % 2 else -1]
                if not sides:
                    continue
                needed, left = sum(slowest.get(side, UNKNOWN_SECONDS) for side in sides), self.budget.left
                if needed > left:
                    text = f"it needs about {needed:.0f} s of {max(left, 0):.0f} s left"
                    self.results.note(f"Not run: {job.row}, round {number}: {text}.")
                    continue
                model = job.case.model
                try:
                    weights[model] = weights.get(model) or self.run_role("weights", job)["folder"]
                except RoleFailed as error:
                    self.results.add(job.row, "ours", {"round": number, "error": f"initial weights: {error}"})
                    continue
                for side in sides:
                    seconds = self._run_side(side, dataclasses.replace(job, weights=weights[model]), number)
                    slowest[side] = max(slowest.get(side, 0.0), seconds)

    def _run_side(self, side: str, job: Job, number: int) -> float:
        """Run one side and add its result; returns its seconds."""
        began = time.monotonic()
        try:
            found = self.run_role(side, job)
        except RoleFailed as error:
            found = {"error": str(error)}
        seconds = time.monotonic() - began
        self.results.add(job.row, side, {"round": number, "seconds": round(seconds, 1), **found})
        return seconds

    def fill_caches(self, jobs: Sequence[Job], processes: int) -> None:
        """Write initial weights, and compile the graphs of all rows by two steps of one layer, `processes` at a time.

        A failure is only printed: it shows again in the row.
        """
        short = [
            dataclasses.replace(job, warmup=1, timed=1, layers=1) for job in jobs if "compile=all" in job.case.ours
        ]

        weights = {job.case.model: ("weights", job) for job in jobs}
        roles = [*weights.values(), *((side, job) for job in short for side in self.sides(job))]

        def fill(role: tuple[str, Job]) -> None:
            try:
                self.run_role(*role)
            except RoleFailed as error:
                print(f"caches, {role[1].row}, {role[0]}: {error}", file=sys.stderr, flush=True)

        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(fill, roles))

    def run_role(self, role: str, job: Job) -> dict[str, Any]:
        """Run a role in a fresh process for at most the budget; returns the JSON of its last line.

        Raises RoleFailed with the exception in its log.
        """
        print(f"{job.row}: {role}", file=sys.stderr, flush=True)
        # As the launchers of both set for their ranks.
        graphs = role == "ours" and "compile.cuda_graphs=true" in job.case.ours
        extra = {} if graphs else {ALLOC_CONF: EXPANDABLE}
        if role == "ours":
            extra["OMP_WAIT_POLICY"] = "PASSIVE"
        if job.tiny:
            extra["CUDA_VISIBLE_DEVICES"] = ""
        words = [sys.executable, str(SCRIPT), "--role", role, "--cache", str(self.cache)]
        words += ["--job", json.dumps(dataclasses.asdict(job))]
        log = self.results.folder / f"{job.row}-{role}-{job.layers or 'all'}.log".replace("/", "_")
        left = self.budget.left
        with log.open("a+", encoding="utf-8", errors="replace") as written:
            began = written.tell()
            process = subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
                env={**os.environ, **extra},
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=None if left == float("inf") else max(left, 1))
            except subprocess.TimeoutExpired:
                raise RoleFailed(f"ended after {left:.0f} s, when the budget was spent") from None
            finally:
                _end(process)
            if process.returncode == 0:
                return json.loads(output.splitlines()[-1])
            written.seek(began)
            raise RoleFailed(f"exit code {process.returncode}; {cause_in(written.read())} ({log})")


class RoleFailed(RuntimeError):
    """A process failed or ran out of time."""


def _end(process: "subprocess.Popen[str]") -> None:
    """End what is left of a process and of those that it started (loaders, compilers)."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
