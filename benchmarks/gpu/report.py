"""Dated Markdown report whose parts are written as they progress, so that a kill leaves a readable file."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

INTERVAL = 2.0
"""Seconds between two writes of the report while processes run."""


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
        parts = [f"## {name}\n\n{content}" for name, content in self._parts.items()]
        partial = self.path.with_suffix(".partial")
        partial.write_text("\n\n".join([f"# {self._title}", *parts]) + "\n", encoding="utf-8")
        os.replace(partial, self.path)


@dataclass
class Running:
    """Process of a part, with its log; ended with everything that it started."""

    words: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    process: "subprocess.Popen[bytes]" = field(init=False)
    timed_out: bool = field(init=False, default=False)
    """True if it was ended at its limit."""

    def __post_init__(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.words, stdout=log, stderr=subprocess.STDOUT, env=dict(self.environment), start_new_session=True
            )

    def end(self) -> None:
        """End the process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(3)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def ending(self) -> str:
        """Sentence about an end other than success; empty for success."""
        if self.timed_out:
            return "ended when its share of the budget was spent"
        if self.process.returncode:
            text = self.log.read_text(encoding="utf-8", errors="replace")
            return f"exit code {self.process.returncode}; {cause_in(text)}"
        return ""


def wait_for(processes: Sequence[Running], seconds: float, progress: Callable[[], None]) -> None:
    """Wait for processes for at most `seconds`, calling `progress` meanwhile, and end what is left."""
    end = time.monotonic() + seconds
    try:
        while any(running.process.poll() is None for running in processes):
            left = end - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(INTERVAL, left))
            progress()
    finally:
        for running in processes:
            running.timed_out = running.process.poll() is None
            running.end()
        progress()


def cause_in(text: str) -> str:
    """First line of the last exception in a log, else its last line."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in text.splitlines()]
    lines = [line for line in lines if line.strip()] or ["nothing in its log"]
    begun = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    after = lines[begun[-1] + 1 :] if begun else []
    return next((line for line in after if not line.startswith(" ")), lines[-1])[:300]


def last_line(log: Path) -> str:
    """Last line of a log that is not empty."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"
