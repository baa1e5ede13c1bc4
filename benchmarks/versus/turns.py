"""Alternating runs of both sides (A B B A), each in a fresh process, within a time budget; their results.

Every process's result is one flushed JSON line, and the Markdown table is written again after each.
"""

import dataclasses
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.bench import (
    CALL,
    ProcessFailed,
    Running,
    environment,
    markdown,
    number,
    result_in,
    wait_for,
    write_whole,
)
from benchmarks.versus.cases import MEMORY_GOAL, PEER, SIDES, Job, case_of, sides_of
from titan_exp.config.devices import ALLOC_CONF, EXPANDABLE
from titan_exp.launch.rank.rank_env import waiting_threads

COMMAND = CALL
"""Command of a role's process."""
UNKNOWN_SECONDS = 60.0
"""Estimated seconds of a side's first process: imports, weights, compilation, steps."""
LEGEND = (
    "Median of the timed steps, then over processes; memory is the largest peak of the timed steps; losses are those "
    f"of the first steps from the same weights. Goal for reserved memory: at most {MEMORY_GOAL} of torchtitan's."
)
"""Line below every table."""


class Results:
    """Results in a folder: `rows.jsonl` and `table.md`."""

    def __init__(self, folder: Path, head: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._head = folder, head
        self._found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self._rows: list[str] = []
        self._notes: list[str] = []

    @property
    def failed(self) -> bool:
        """True if a process failed."""
        return any("error" in result for results in self._found.values() for result in results)

    def add(self, row: str, side: str, result: dict[str, Any]) -> None:
        """Append the result of one process, or its `error`."""
        if row not in self._rows:
            self._rows.append(row)
        self._found[row, side].append(result)
        with (self.folder / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"row": row, "side": side, **result}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._write()

    def note(self, text: str) -> None:
        """Add a line below the table."""
        self._notes.append(text)
        self._write()

    def good(self, row: str, side: str) -> list[dict[str, Any]]:
        """Results of the processes that did not fail."""
        return [result for result in self._found[row, side] if "error" not in result]

    def table(self) -> str:
        """Markdown table of all rows so far."""
        them = f"torchtitan {PEER}"
        head = ["case", f"{them} tokens/s", "ours", "ratio", "goal", f"{them} GiB reserved", "ours", "ratio"]
        head += ["allocated, both", "largest loss difference", "processes"]
        table = markdown(head, [self._cells(row) for row in self._rows])
        return "\n".join([self._head, "", table, "", LEGEND, *self._notes]) + "\n"

    def _cells(self, row: str) -> list[str]:
        case, base = case_of(row), row.partition("+")[0]
        us, them = self.good(row, "ours"), self.good(base, "peer")
        failures = [result["error"] for side in SIDES for result in self._found[row, side] if "error" in result]
        my_speed, my_memory = _median(us, "tokens_per_second"), _largest(us, "reserved")
        speed, memory = _median(them, "tokens_per_second"), _largest(them, "reserved")
        apart = "–"
        if us and them:
            pairs = zip(us[0]["losses"], them[0]["losses"], strict=True)
            apart = f"{max(abs(mine - theirs) for mine, theirs in pairs):.1e}"
        return [
            case.title,
            number(speed, ",.0f"),
            number(my_speed, ",.0f"),
            _ratio(my_speed, speed),
            "–" if case.goal is None else f"≥ {case.goal:.2f}",
            number(memory, ".1f"),
            number(my_memory, ".1f"),
            _ratio(my_memory, memory),
            f"{number(_largest(them, 'allocated'), '.1f')} / {number(_largest(us, 'allocated'), '.1f')}",
            apart,
            f"{len(them)} + {len(us)}" + "".join(f"; failed: {error.replace('|', '/')}" for error in failures),
        ]

    def _write(self) -> None:
        write_whole(self.folder / "table.md", self.table())


def _median(results: list[dict[str, Any]], key: str) -> float | None:
    return statistics.median(result[key] for result in results) if results else None


def _largest(results: list[dict[str, Any]], key: str) -> float | None:
    return max((result[key] for result in results if result[key] is not None), default=None)


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "–" if not ours or not theirs else f"{ours / theirs:.3f}"


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
        for turn in range(1, rounds + 1):
            for job in jobs:
                sides = self.sides(job)[:: 1 if turn % 2 else -1]
                if not sides:
                    continue
                needed, left = sum(slowest.get(side, UNKNOWN_SECONDS) for side in sides), self.budget.left
                if needed > left:
                    text = f"it needs about {needed:.0f} s of {max(left, 0):.0f} s left"
                    self.results.note(f"Not run: {job.row}, round {turn}: {text}.")
                    continue
                model = job.case.model
                try:
                    weights[model] = weights.get(model) or self.run_role("weights", job)["folder"]
                except ProcessFailed as error:
                    self.results.add(job.row, "ours", {"round": turn, "error": f"initial weights: {error}"})
                    continue
                for side in sides:
                    seconds = self._run_side(side, dataclasses.replace(job, weights=weights[model]), turn)
                    slowest[side] = max(slowest.get(side, 0.0), seconds)

    def _run_side(self, side: str, job: Job, turn: int) -> float:
        """Run one side and add its result; returns its seconds."""
        began = time.monotonic()
        try:
            found = self.run_role(side, job)
        except ProcessFailed as error:
            found = {"error": str(error)}
        seconds = time.monotonic() - began
        self.results.add(job.row, side, {"round": turn, "seconds": round(seconds, 1), **found})
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
            except ProcessFailed as error:
                print(f"caches, {role[1].row}, {role[0]}: {error}", file=sys.stderr, flush=True)

        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(fill, roles))

    def run_role(self, role: str, job: Job) -> dict[str, Any]:
        """Run a role in a fresh process for at most the budget; returns its result.

        Raises ProcessFailed with the exception in its log.
        """
        print(f"{job.row}: {role}", file=sys.stderr, flush=True)
        # As the launchers of both set for their ranks.
        graphs = role == "ours" and "compile.cuda_graphs=true" in job.case.ours
        extra = {} if graphs else {ALLOC_CONF: EXPANDABLE}
        if role == "ours":
            extra |= waiting_threads()
        if job.tiny:
            extra["CUDA_VISIBLE_DEVICES"] = ""
        arguments = {"role": role, "cache": str(self.cache), "job": dataclasses.asdict(job)}
        words = [*COMMAND, "benchmarks.versus.sides:run_role", json.dumps(arguments)]
        log = self.results.folder / f"{job.row}-{role}-{job.layers or 'all'}.log".replace("/", "_")
        left = max(self.budget.left, 1.0)
        running = Running(words, environment(**extra), log)
        wait_for([running], left)
        if running.timed_out:
            raise ProcessFailed(f"ended after {left:.0f} s, when the budget was spent")
        if running.ending:
            raise ProcessFailed(f"{running.ending} ({log})")
        return result_in(running.text)
