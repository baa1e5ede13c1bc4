"""pytest plugin: outcome of every test as a flushed JSON line, so that a killed run leaves what it found."""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

VARIABLE = "GPU_REPORT_OUTCOMES"
"""Environment variable with the path of the file."""


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
    table = ["| room | passed | failed | skipped | not run | seconds |", "|---|--:|--:|--:|--:|--:|"]
    for room in sorted({*collected, *(_room(test) for test, _ in found)}):
        here = [line for line in found.values() if _room(line["test"]) == room]
        counts = [sum(line["outcome"] == outcome for line in here) for outcome in ("passed", "failed", "skipped")]
        ran = {line["test"] for line in here if "::" in line["test"]}
        seconds = sum(line["seconds"] for line in here)
        numbers = [*counts, max(collected[room] - len(ran), 0)]
        table.append(f"| {room} | {' | '.join(map(str, numbers))} | {seconds:.0f} |")
    failures = [f"- `{line['test']}`: {_one_line(line)}" for line in found.values() if line["outcome"] == "failed"]
    reasons = sorted({_one_line(line) for line in found.values() if line["outcome"] == "skipped"})
    skipped = [f"Skipped because: {'; '.join(reasons)}."] if reasons else []
    return "\n\n".join(filter(None, ["\n".join(table), "\n".join(failures), *skipped]))


def _one_line(line: dict[str, Any]) -> str:
    return " ".join(line["message"].split())
