"""Reader of a run folder: each file once, when it is first needed, with its overrides, its code and its parent.

The configuration's reader imports Hydra, so it is imported only with the configuration: completion lists runs.
"""

import hashlib
import json
import os
import re
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from yaml import YAMLError

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import provided
from titan_exp.config.foreign_file import load_node, of_kind, read_file, read_text
from titan_exp.tracking.display import format_duration
from titan_exp.tracking.run_folder.files import write_atomically
from titan_exp.tracking.run_folder.metrics_jsonl import MetricRows, Value, read_last_values, read_metrics
from titan_exp.tracking.run_folder.run_folder import (
    ENDED_STATES,
    Attempt,
    Heartbeat,
    RunFolder,
    RunState,
    read_json,
    shown_state,
)

if TYPE_CHECKING:
    from titan_exp.config.groups.experiment import Experiment


def overrides_text(overrides: Sequence[str]) -> str:
    """Content of an overrides file."""
    return "".join(f"- {json.dumps(override, ensure_ascii=False)}\n" for override in overrides) or "[]\n"


def read_overrides(path: Path) -> tuple[str, ...] | None:
    """Overrides in a file; None if the file is missing or not an overrides file."""
    try:
        _, lines = load_node(read_text(path))
        return of_kind(tuple[str, ...], lines)
    except (OSError, ValueError, YAMLError, UserError):
        return None


def for_shell(override: str) -> str:
    """Override as typed in a shell; in double quotes if its value has single quotes."""
    return f'"{override}"' if "'" in override and not re.search(r'["$`\\!\n]', override) else shlex.quote(override)


@dataclass(frozen=True)
class CodePart:
    """titan_exp, or a part of your code: a repository, an installed package, or loose files."""

    name: str  # name of the package or repository; unique in a run
    version: str | None = None  # version of the installed package
    commit: str | None = None  # full hash of HEAD; None without a repository
    branch: str | None = None  # branch; None if HEAD is detached
    dirty: bool | None = None  # True if the working tree differs from the commit, or has untracked code

    @property
    def state(self) -> str:
        """Commit of a repository, or version of a package, as text."""
        if self.commit:
            return f"commit {self.commit[:10]}{' with uncommitted changes' if self.dirty else ''}"
        return f"version {self.version}" if self.version else "no commit"

    def __str__(self) -> str:
        return f"{self.name}: {self.state}{f' ({self.branch})' if self.branch else ''}"


@dataclass(frozen=True)
class CodeVersion(CodePart):
    """Part of a run's code, with the data that determine its content."""

    path: str | None = None  # top folder of the repository; without one, the folder that holds the package or the files
    remote: str | None = None  # URL of the remote `origin`, without credentials
    left_out: tuple[str, ...] = ()  # untracked files too large for the diff, and nested repositories
    masked: bool = False  # True if credentials were masked in the diff, so that it cannot be applied
    diff: str | None = None  # checksum of the diff before masking; None if there is no diff
    files: dict[str, str] = field(default_factory=dict)  # checksums by name relative to `path`; empty if too many


@dataclass(frozen=True)
class CodeRecord:
    """Content of `code.json`: code of a run, and its ids."""

    parts: tuple[CodeVersion, ...]  # titan_exp, then your repositories and packages
    import_paths: Mapping[str, str] = field(default_factory=dict)  # names of your code, by configuration key
    frozen: Mapping[str, Any] | None = None  # import folders of the code snapshot; None if code is imported in place
    run_id: str | None = None
    experiment_id: str | None = None

    @property
    def dirty(self) -> bool | None:
        """True if a part differs from its commit; None if that is unknown."""
        return any(part.dirty for part in self.parts[1:]) or self.parts[0].dirty

    def to_json(self) -> str:
        """Text of `code.json`, where titan_exp's fields are not nested."""
        own, *imported = map(asdict, self.parts)
        frozen = {} if self.frozen is None else {"frozen": self.frozen}
        users = {"import_paths": self.import_paths, "imported": imported} if imported else {}
        ids = {"run_id": self.run_id, "experiment_id": self.experiment_id}
        return json.dumps({**ids, **own, **frozen, **users}, indent=1) + "\n"


def code_record(values: Mapping[str, Any]) -> CodeRecord:
    """Code record from `code.json`, also of other versions. Raises ValueError if a value has another type."""
    parts = [{**values, "name": "titan_exp"}, *of_kind(list[dict], values.get("imported") or [])]
    return of_kind(CodeRecord, _known(CodeRecord, {**values, "parts": [_known(CodeVersion, part) for part in parts]}))


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: values[each.name] for each in fields(kind) if values.get(each.name) is not None}


class EnvironmentRecord(TypedDict, total=False):
    """Content of `env.json`."""

    cpu: str | None
    cores: int | None
    cores_usable: int | None
    gpus: list[dict[str, Any]] | None
    packages: dict[str, Any] | None
    environment: dict[str, Any] | None


def read_code(path: Path) -> CodeRecord | None:
    """Code record of a run; None if missing. Raises UserError if it is damaged."""

    def made(values: dict[str, Any]) -> CodeRecord:
        patch = b""
        if "diff" not in values:  # older versions recorded no checksum of the diff
            with suppress(FileNotFoundError):
                patch = read_file(path.with_name("diff.patch"))
        return code_record({"diff": digest(patch) if patch else None, **values})

    return read_json(path, made=made)


def digest(content: bytes) -> str:
    """Checksum of a file or diff in `code.json`."""
    return hashlib.blake2b(content, digest_size=6).hexdigest()


LINEAGE_FILE = "lineage.json"  # file name in the run folder


@dataclass(frozen=True)
class Lineage:
    """Parent of a run."""

    parent: str  # run folder or URL
    step: int  # step of the parent's checkpoint
    tokens: int  # tokens that the parent had trained on

    @staticmethod
    def read(run_folder: Path) -> "Lineage | None":
        """Lineage of a run; None if it was not continued from another. Raises UserError if the file is damaged."""
        return read_json(run_folder / LINEAGE_FILE, Lineage)

    def write(self, run_folder: Path) -> None:
        """Write the file of a run."""
        write_atomically(run_folder / LINEAGE_FILE, json.dumps(asdict(self), indent=1) + "\n")

    @property
    def name(self) -> str:
        """NAME/ID of the parent, or its URL."""
        return self.parent if "://" in self.parent else "/".join(Path(self.parent).parts[-2:])

    def parent_folder(self, run_folder: Path) -> Path | None:
        """Run folder of the parent, even if both were moved together; None if it is not on this machine."""
        moved = run_folder.absolute().parents[1].joinpath(*Path(self.parent).parts[-2:])
        return next((path for path in (Path(self.parent), moved) if path.is_dir()), None)

    def __str__(self) -> str:
        return f"{self.name} after step {self.step}"


@dataclass(frozen=True)
class Ancestor:
    """Run that another run continues, directly or not."""

    lineage: Lineage  # lineage record of its child, which names this run
    folder: Path | None  # run folder; None if it is not on this machine


def ancestors(run_folder: Path) -> Iterator[Ancestor]:
    """Parent of a run, the parent's parent, and so on to the last one on this machine."""
    folder, seen = run_folder, {run_folder.resolve()}
    while (lineage := Lineage.read(folder)) is not None:
        parent = lineage.parent_folder(folder)
        if parent is not None and parent.resolve() in seen:
            return
        yield Ancestor(lineage, parent)
        if parent is None:
            return
        seen.add(parent.resolve())
        folder = parent


def children(run_folder: Path) -> list[tuple[Path, Lineage]]:
    """Run folders beside a run, in any group, that were continued from it."""
    found = []
    for path in sorted(run_folder.absolute().parents[1].glob(f"*/[!.]*/{LINEAGE_FILE}")):
        with suppress(UserError, OSError):  # damaged (`show` of that run explains it), or closed to this user
            lineage = Lineage.read(path.parent)
            parent = None if lineage is None else lineage.parent_folder(path.parent)
            if lineage is not None and parent is not None and parent.resolve() == run_folder.resolve():
                found.append((path.parent, lineage))
    return found


def late_values(run_folder: Path) -> dict[int, dict[str, Any]]:
    """Metrics that work which outlives a run has written, by step, ascending. Raises UserError if a row is damaged."""
    found: dict[int, dict[str, Any]] = {}
    for prefix, file in provided("late").items():
        for row in read_metrics(run_folder / file):
            values = {f"{prefix}{name}": value for name, value in row.items() if name not in ("step", "tokens")}
            found[row["step"]] = found.get(row["step"], {}) | values
    return dict(sorted(found.items()))


def _rows(run_folder: Path, file: str) -> MetricRows:
    rows, late = read_metrics(run_folder / file), late_values(run_folder) if file == METRICS else {}
    return MetricRows(row | late.get(row["step"], {}) for row in rows) if late else rows


METRICS = "metrics.jsonl"


def read_history(run_folder: Path, file: str = METRICS) -> MetricRows:
    """Rows of a run's metrics, preceded by its ancestors' rows up to the steps at which they were continued. `file` may
    be another file of such rows. A parent that is not on this machine has no rows. Raises UserError if a row is
    damaged."""
    rows = _rows(run_folder, file)
    for ancestor in ancestors(run_folder):
        if ancestor.folder is not None:
            earlier = (row for row in _rows(ancestor.folder, file) if row["step"] <= ancestor.lineage.step)
            rows = MetricRows(chain(earlier, rows))
    return rows


StatusName = Literal["new", "queued", "running", "done", "failed", "preempted", "lost", "unknown", "unreadable"]
"""`new`: never started. `queued`: in the scheduler's queue. `lost`: exited without recording its end. `unknown`: the
scheduler that may hold its job does not answer."""

STALE = 60.0  # seconds without a heartbeat before a run without a known holder counts as lost
ENDED = ("done", "failed", "preempted")  # recorded states that need no check of locks or heartbeat
SWEEP_GONE = "launcher whose sweep was killed"
"""Role of a launcher, in the run lock, that goes on although the sweep that started it is gone."""
DIED_UNRECORDED = "died without a record (killed, or the machine went down)"


@dataclass(frozen=True)
class RunStatus:
    """Current status of a run."""

    state: StatusName
    step: int
    reason: str | None
    attempt: int
    """Number of the last attempt; 0 before the first."""
    job_id: str | None = None

    @property
    def shown(self) -> str:
        """Word for the state."""
        return shown_state(self.state, self.reason)

    @property
    def active(self) -> bool:
        """True if queued or running, or unknown and thus possibly so."""
        return self.state in ("queued", "running", "unknown")


@dataclass(frozen=True)
class PredictedMetrics:
    """Predicted counterparts of measured metrics, in the units of metrics.jsonl; None if not predicted."""

    memory: float | None = None  # peak of rank 0 in GiB: of allocated tensors on a GPU, of the whole process on a CPU
    tokens_per_second: float | None = None  # throughput of the whole job


def _predicted(found: dict[str, Any]) -> PredictedMetrics:
    known = {key: found[key] for key in ("memory", "tokens_per_second") if key in found}
    return of_kind(PredictedMetrics, known)


class Run(os.PathLike[str]):
    """A run as its folder describes it; anybody may have written it, and it may be in any state. Each member reads its
    file once, up to the size limit of its kind, and keeps the result. To see a change, make another `Run`. A member
    raises UserError if its file is damaged."""

    def __init__(self, folder: "RunFolder | Run | str | os.PathLike[str]") -> None:
        self.folder = folder if isinstance(folder, RunFolder) else RunFolder(Path(folder))

    def __fspath__(self) -> str:
        return str(self.folder.path)

    __str__ = __fspath__

    @cached_property
    def config(self) -> dict[str, Any]:
        """Values of config.yaml, not validated. Raises UserError if there are none."""
        from titan_exp.config.schema.typed_config import read_values

        return read_values(self.folder.config)

    @cached_property
    def experiment(self) -> "Experiment":
        """Configuration for a process that trains the run, and therefore imports the code that it names."""
        from titan_exp.config.schema.typed_config import load_experiment

        return load_experiment(self.folder.config, trust=True)

    def group(self, name: str) -> Any:
        """One group of the configuration; the code that it names is not imported."""
        if "experiment" in vars(self):
            return getattr(self.experiment, name)
        from titan_exp.config.schema.typed_config import group_of

        return group_of(self.config, name, self.folder.config)

    @cached_property
    def state(self) -> RunState | None:
        """Content of state.json; if that was deleted, the last attempt's state. None before the first attempt."""
        state = self.folder.read_state()
        if state is not None or not self.attempts:
            return state
        last = self.attempts[-1]
        name = "running" if last.end is None else ENDED_STATES.get(last.exit, "failed")
        return RunState(name, 0, last.end or last.start or last.intent, last.attempt, last.reason)

    @cached_property
    def attempts(self) -> list[Attempt]:
        """All attempts, oldest first."""
        return self.folder.read_attempts()

    @cached_property
    def heartbeat(self) -> Heartbeat | None:
        """Last heartbeat; None before the first, or if it is damaged."""
        return self.folder.read_heartbeat()

    @cached_property
    def status(self) -> RunStatus:
        """Status by files and locks; if a run is not done, its scheduler may know better. A run without a recorded end
        is lost if no process holds it. If its last attempt is another machine's, whose locks a network disk may hide, a
        sign of life in the last STALE seconds counts instead."""
        state = self.state
        if state is None:
            return RunStatus("new", 0, None, 0)
        last = self.attempts[-1] if state.state != "done" and self.attempts else None
        job_id = None if last is None else last.job_id
        if state.state in ENDED:
            return RunStatus(state.state, state.step, state.reason, state.attempt, job_id)
        beat = self.heartbeat
        step = max(state.step, beat.step if beat and beat.time >= state.time else 0)
        if (holder := self.folder.holder()) is not None:
            reason = None if holder.role != SWEEP_GONE else self._without_sweep
            return RunStatus("running", step, reason, state.attempt, job_id)
        if last is None:
            return RunStatus("new", 0, None, 0)
        age = time.time() - max(state.time, last.intent, beat.time if beat else 0.0)
        if last.hosts != (socket.gethostname(),) and age < STALE:
            return RunStatus("running", step, None, state.attempt, job_id)
        reason = DIED_UNRECORDED
        if state.attempt:
            since = format_duration(max(0, round(age)))
            reason = f"attempt {state.attempt} {reason}, last heartbeat {since} ago"
        return RunStatus("lost", step, reason, state.attempt, job_id)

    @property
    def _without_sweep(self) -> str:
        return (
            "its sweep was killed, so the run goes on alone to its end, and no further one starts. Wait for it and "
            "type the command of the sweep again, or stop what runs: titan-exp cancel "
            f"{shlex.quote(str(self.folder.path.parent))}"
        )

    @cached_property
    def code(self) -> CodeRecord | None:
        """Code record; None if missing."""
        return read_code(self.folder.code)

    @cached_property
    def environment(self) -> dict[str, Any] | None:
        """Environment record; None if missing."""
        return read_json(self.folder.env, EnvironmentRecord)

    @cached_property
    def overrides(self) -> tuple[str, ...] | None:
        """Overrides as typed; None if they cannot be read."""
        return read_overrides(self.folder.overrides)

    @cached_property
    def nondefault(self) -> tuple[str, ...] | None:
        """Overrides that differ from the defaults of the code that started the run; None if they cannot be read."""
        return read_overrides(self.folder.nondefault)

    @cached_property
    def ancestors(self) -> list[Ancestor]:
        """Parent, the parent's parent, and so on to the last one on this machine."""
        return list(ancestors(self.folder.path))

    @cached_property
    def lineage(self) -> Lineage | None:
        """Parent of a continued run, and the step at which it begins; None for other runs."""
        return Lineage.read(self.folder.path)

    @cached_property
    def predicted(self) -> PredictedMetrics:
        """Predictions made before the start; their values are None if plan.json is missing or damaged."""
        with suppress(UserError):
            return read_json(self.folder.plan, made=_predicted) or PredictedMetrics()
        return PredictedMetrics()

    @cached_property
    def rows(self) -> MetricRows:
        """Rows of metrics, one per step."""
        return read_metrics(self.folder.metrics)

    @cached_property
    def last_values(self) -> dict[str, Value]:
        """Latest value of every metric, read only from the end of the file, and those of work that outlives the run."""
        found = read_last_values(self.folder.metrics)
        for values in late_values(self.folder.path).values():
            found |= values
        return found
