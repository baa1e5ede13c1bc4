"""pytest plugin: outcome of every test as a flushed JSON line, so that a killed run leaves what it found."""

import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "GPU_REPORT_OUTCOMES"
"""Environment variable with the path of the file."""


def pytest_runtest_logreport(report: Any) -> None:
    """Append a test's outcome; under pytest-xdist only the controller's plugin has the path."""
    path = os.environ.get(VARIABLE)
    if path is None or "PYTEST_XDIST_WORKER" in os.environ:
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
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2), "message": message}
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()


def by_room(path: Path) -> str:
    """Markdown table of passed, failed and skipped tests and seconds by room, and the failures below it."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    rooms: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        rooms.setdefault(line["test"].split("/")[1] if "/" in line["test"] else line["test"], []).append(line)
    table = ["| room | passed | failed | skipped | seconds |", "|---|--:|--:|--:|--:|"]
    for room, found in sorted(rooms.items()):
        counts = [sum(line["outcome"] == outcome for line in found) for outcome in ("passed", "failed", "skipped")]
        seconds = sum(line["seconds"] for line in found)
        table.append(f"| {room} | {counts[0]} | {counts[1]} | {counts[2]} | {seconds:.0f} |")
    failures = [f"- `{line['test']}`: {_one_line(line)}" for line in lines if line["outcome"] == "failed"]
    reasons = sorted({_one_line(line) for line in lines if line["outcome"] == "skipped"})
    skipped = [f"Skipped because: {'; '.join(reasons)}."] if reasons else []
    return "\n\n".join(filter(None, ["\n".join(table), "\n".join(failures), *skipped]))


def _one_line(line: dict[str, Any]) -> str:
    return " ".join(line["message"].split())
