"""Frame of every benchmark: options, output, timing, experiments, and work in processes of its own.

The top imports the standard library alone: `make gpu` starts before its packages are installed.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from titan_exp.config.groups.experiment import Experiment

ROOT = Path(__file__).resolve().parents[1]
"""Root of the checkout."""
GIB = 2**30
INTERVAL = 2.0
"""Seconds between two reports of progress while processes run."""
PACKAGES = ("torch", "triton", "torchao", "torchtitan", "transformers", "numpy", "hydra-core")
"""Packages whose versions every benchmark prints."""
_SAME: Any = object()
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class CannotRun(Exception):
    """Requirements of a benchmark that this machine lacks, one an argument."""


class ProcessFailed(RuntimeError):
    """A process of a benchmark failed or ran out of time."""


def benchmark(function: F) -> F:
    """Mark a function of options and output as a benchmark; `python -m benchmarks` reads the mark and the docstring."""
    return function


def tool(function: F) -> F:
    """Mark a function likewise that measures nothing."""
    return function


def option(
    default: Any,
    text: str,
    *,
    smallest: Any = _SAME,
    choices: Sequence[str] = (),
    parse: Callable[[str], Any] | None = None,
    positional: bool | str = False,
) -> Any:
    """Field of a class of options: its default, its help, and its value under `--smallest`, or a function of it.

    The annotation says the type; a tuple takes any number of values. `positional` options have no flag, those of "rest"
    take all words that follow.
    """
    known = {"help": text, "choices": choices, "parse": parse, "positional": positional}
    return field(default=default, metadata=known | ({} if smallest is _SAME else {"smallest": smallest}))


def temporary() -> Path:
    """New folder that is left behind, as results are."""
    return Path(tempfile.mkdtemp())


def line(cells: Sequence[str]) -> str:
    """Row of a Markdown table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: int | None = None) -> str:
    """Markdown table with `right` columns of numbers after the first one; all of them without."""
    right = len(head) - 1 if right is None else right
    return "\n".join([line(head), "|---" + "|--:" * right + "|---" * (len(head) - 1 - right) + "|", *map(line, rows)])


def number(value: float | None, form: str) -> str:
    """Formatted number; a dash for None."""
    return "–" if value is None else f"{value:{form}}"


class Output:
    """Printed text and tables of a benchmark, below a line about the machine; kept for a file."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._printed = path, list[str]()
        self._tables: list[dict[str, Any]] = []
        self.headed = False
        """True once the line about the machine is printed, or where the text has one."""

    def say(self, text: str = "") -> None:
        """Print text at once."""
        if not self.headed:
            self.headed = True
            self.say(f"{machine()}\n")
        self._printed.append(text)
        print(text, flush=True)

    def table(self, columns: Mapping[str, str], title: str = "") -> "Table":
        """Begin a table whose rows are printed as they are found; `columns` have the formats of their numbers."""
        if title:
            self.say(f"\n{title}\n" if self._printed else f"{title}\n")
        rows: list[dict[str, Any]] = []
        self._tables.append({"title": title, "rows": rows})
        return Table(self, columns, rows)

    def close(self) -> None:
        """Write the file: tables with raw numbers as JSON, or the text as printed."""
        if self._path is None:
            return
        text = "\n".join(self._printed)
        if self._path.suffix == ".json":
            found = {"command": sys.argv[1:], "machine": machine(), "tables": self._tables, "text": text}
            text = json.dumps(found, indent=1)
        self._path.write_text(f"{text}\n", encoding="utf-8")


class Table:
    """Markdown table that is printed row by row."""

    def __init__(self, output: Output, columns: Mapping[str, str], rows: list[dict[str, Any]]) -> None:
        self._output, self._columns, self._rows = output, columns, rows
        output.say(markdown([*columns], []))

    def add(self, *cells: Any) -> None:
        """Print a row; words and None have no format."""
        row = dict(zip(self._columns, cells, strict=True))
        self._rows.append(row)
        texts = [cell if isinstance(cell, str) else number(cell, self._columns[name]) for name, cell in row.items()]
        self._output.say(line(texts))


def write_whole(path: Path, text: str) -> None:
    """Write or replace a file at once, so that readers find a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@cache
def commit() -> str:
    """Commit of this checkout; `unknown` where git or its folder is missing."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def machine() -> str:
    """Date, commit, hardware, load and versions, as entries of the log begin."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    cores = f"{len(os.sched_getaffinity(0))} cores of {[*names, platform.machine()][0]}"
    parts = [time.strftime("%Y-%m-%d"), f"commit {commit()}", f"{cores}, load {os.getloadavg()[0]:.1f}"]
    # A benchmark that has not imported torch measures nothing with it in this process.
    if (torch := sys.modules.get("torch")) is not None:
        parts += [f"{torch.get_num_threads()} threads", _gpus(torch)]
    versions = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return ", ".join([*parts, *versions])


def _gpus(torch: Any) -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    it = torch.cuda.get_device_properties(0)
    gpus = f"{torch.cuda.device_count()} x {it.name}, capability {it.major}.{it.minor}, {it.total_memory / GIB:.0f} GiB"
    return f"{gpus}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"


def seconds_of(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    begin = clock()
    action()
    return clock() - begin


def repeated(action: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of each call, repeated for at least `seconds`."""
    times: list[float] = []
    while not times or sum(times) < seconds:
        times.append(seconds_of(action))
    return times


def in_turns(
    actions: Mapping[str, Callable[[], T]], rounds: int, *, seconds: float = 0.0, swap: bool = False
) -> dict[str, list[T]]:
    """Results of actions that take turns for at least `rounds` rounds and `seconds`, so that what else the machine does
    falls on all; `swap` turns their order around in every second round."""
    found: dict[str, list[T]] = {name: [] for name in actions}
    begin, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - begin < seconds:
        for name in [*actions][:: -1 if swap and done % 2 else 1]:
            found[name].append(actions[name]())
        done += 1
    return found


def composed(*words: str) -> "Experiment":
    """Experiment of overrides."""
    from titan_exp.config.hydra.compose import compose
    from titan_exp.config.schema.typed_config import to_experiment

    return to_experiment(compose(list(words)))


def resolved(*words: str, ranks: int | None = 1) -> "Experiment":
    """Resolved and checked experiment of overrides for `ranks` devices; None takes those of its cluster, which need not
    be here."""
    from titan_exp.config.devices import offered_devices
    from titan_exp.config.layout.resolved_layout import resolve_layout
    from titan_exp.rules import check

    experiment = composed(*words)
    if ranks is None:
        return resolve_layout(check(experiment), offered_devices(experiment.cluster))
    return check(resolve_layout(experiment, ranks))


def threads() -> int:
    """Number of threads: `OMP_NUM_THREADS`, else this process's cores."""
    return int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))


def environment(*path: Path, **extra: str) -> dict[str, str]:
    """Environment of processes that import this checkout, and then what is in `path`."""
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, [ROOT, *path, given]))), **extra}


def titan_exp(*words: str) -> list[str]:
    """Words of a command of this checkout."""
    return [sys.executable, "-m", "titan_exp", *words]


def trained(runs: Path, *words: str) -> Path:
    """Train a run to its end; returns its folder."""
    overrides = (f"paths.runs={runs}", "experiment.name=trained", *words)
    subprocess.run(titan_exp("train", *overrides), check=True, capture_output=True, env=environment())
    return next((runs / "trained").iterdir())


def call_words(function: Callable[..., Any], **arguments: Any) -> list[str]:
    """Words of a process that calls a function and prints its result as JSON."""
    return [*CALL, f"{function.__module__}:{function.__name__}", json.dumps(arguments)]


CALL = [sys.executable, "-m", "benchmarks", "call"]


def result_of(words: Sequence[str], *, seconds: float | None = None, **extra: str) -> Any:
    """Result of a process, as `call_words` names it; `extra` is environment.

    Raises ProcessFailed with the exception in its log.
    """
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=seconds, env=environment(**extra)
        )
    except subprocess.TimeoutExpired:
        raise ProcessFailed(f"over {seconds} s") from None
    if done.returncode:
        raise ProcessFailed(f"exit code {done.returncode}; {cause_in(done.stderr)}")
    return result_in(done.stdout)


def result_in(text: str) -> Any:
    """Result in what a process has printed: JSON alone, or its last line of it."""
    with suppress(json.JSONDecodeError):
        return json.loads(text)
    for printed in reversed(text.splitlines()):
        if printed.startswith("{"):
            with suppress(json.JSONDecodeError):
                return json.loads(printed)
    raise ProcessFailed(f"no result; {cause_in(text)}")


@dataclass
class Running:
    """Process with its log; ended with everything that it started."""

    words: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    folder: Path | None = None
    """Working folder, this process's without."""
    process: "subprocess.Popen[bytes]" = field(init=False)
    timed_out: bool = field(init=False, default=False)
    """True if it was ended at its limit."""

    def __post_init__(self) -> None:
        with self.log.open("ab") as log:
            self._began = log.tell()
            self.process = subprocess.Popen(
                self.words,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                cwd=self.folder,
                start_new_session=True,
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
    def text(self) -> str:
        """Its part of the log."""
        return self.log.read_bytes()[self._began :].decode(errors="replace")

    @property
    def ending(self) -> str:
        """Sentence about an end other than success; empty for success."""
        if self.timed_out:
            return "ended when its share of the budget was spent"
        return f"exit code {self.process.returncode}; {cause_in(self.text)}" if self.process.returncode else ""


def wait_for(processes: Sequence[Running], seconds: float, progress: Callable[[], None] = lambda: None) -> None:
    """Wait for processes for at most `seconds`, calling `progress` meanwhile, and end what is left."""
    end = time.monotonic() + seconds
    try:
        while waiting := [running for running in processes if running.process.poll() is None]:
            left = end - time.monotonic()
            if left <= 0:
                break
            with suppress(subprocess.TimeoutExpired):
                waiting[0].process.wait(min(INTERVAL, left))
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
