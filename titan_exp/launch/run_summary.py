"""Summary of one run, for `titan-exp show`: configuration, code, lineage, state, checkpoints, next commands."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from titan_exp.config.checkpoint_files import COMPLETE_NAME, METADATA_FILE, step_of
from titan_exp.config.errors.user_error import UserError, shown
from titan_exp.config.foreign_file import read_text
from titan_exp.config.hydra.nondefault import nondefault_overrides
from titan_exp.config.schema.identity_keys import flatten, has_effect, same_value
from titan_exp.launch.provenance import code_changes, patched_files
from titan_exp.launch.run_console import known_metrics
from titan_exp.launch.run_lookup import RunEntry
from titan_exp.launch.run_status import StatusRow, status_rows
from titan_exp.tracking.display import format_bytes, format_duration, format_items, format_time
from titan_exp.tracking.run_folder.run import CodePart, Run, children, for_shell
from titan_exp.tracking.run_folder.run_folder import ENDED_STATES, Attempt, shown_state


@dataclass(frozen=True)
class RecordedCode:
    """Code of a run."""

    parts: tuple[CodePart, ...]  # titan_exp, then the user's repositories and packages
    changed: tuple[str, ...]


@dataclass(frozen=True)
class SavedCheckpoint:
    """Complete checkpoint of a run."""

    step: int
    bytes: int


@dataclass(frozen=True)
class Relative:
    """Parent or child of a run."""

    run: str  # NAME/ID, or URL
    step: int  # step at which the child begins


@dataclass(frozen=True)
class NextCommand:
    """Command for a run, with its purpose."""

    purpose: str
    command: str


@dataclass(frozen=True)
class RunSummary:
    """Everything that `titan-exp show` prints."""

    status: StatusRow
    overrides: tuple[str, ...]  # overrides that differ from today's defaults
    code: RecordedCode
    parents: tuple[Relative, ...] = ()
    children: tuple[Relative, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    commands: tuple[NextCommand, ...] = ()


def summarize_run(entry: RunEntry, name: str) -> RunSummary:
    """Read the summary of a run; its commands refer to it as `name`. Nothing that its configuration names is imported,
    and no interpolation is resolved. Raises UserError if the configuration cannot be read."""
    run, folder, patch = entry.run, entry.folder, ""
    values, recorded = run.config, run.nondefault
    (status,) = status_rows([entry])
    with suppress(FileNotFoundError, UserError):
        patch = read_text(folder.diff)
    names = [each.name for each in fields(CodePart)]
    parts = [CodePart(*(getattr(part, name) for name in names)) for part in (run.code.parts if run.code else ())]
    summary = RunSummary(
        status,
        tuple(nondefault_overrides(values) if recorded is None else recorded),
        RecordedCode(tuple(parts), tuple(patched_files(patch))),
        tuple(Relative(ancestor.lineage.name, ancestor.lineage.step) for ancestor in run.ancestors),
        tuple(Relative("/".join(path.parts[-2:]), lineage.step) for path, lineage in children(folder.path)),
        tuple(run.attempts),
        tuple(_checkpoints(folder.checkpoints)),
    )
    commands = [*_commands_for_state(summary, entry, name), *_commands_from_checkpoints(summary, values, name)]
    return replace(summary, commands=tuple(commands))


def _checkpoints(folder: Path) -> list[SavedCheckpoint]:
    if not folder.is_dir():
        return []
    complete = [path for path in folder.iterdir() if COMPLETE_NAME.fullmatch(path.name)]
    sizes = {
        step_of(path) or 0: sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for path in complete
        if (path / METADATA_FILE).is_file()
    }
    return [SavedCheckpoint(step, size) for step, size in sorted(sizes.items())]


def _commands_for_state(summary: RunSummary, entry: RunEntry, name: str) -> list[NextCommand]:
    match summary.status.state:
        case "failed" | "lost":
            return [_next("retry", "titan-exp retry", name), _next("log", "titan-exp logs", name)]
        case "running" | "queued":
            return [_next("follow", "titan-exp logs -f", name), _next("stop", "titan-exp cancel", name)]
        case "preempted" | "new":
            return [NextCommand("start", entry.start_command)]
    return []


def _commands_from_checkpoints(summary: RunSummary, values: dict[str, Any], name: str) -> list[NextCommand]:
    found, steps = [], summary.status.steps or 0
    weights_only = (values.get("checkpoint") or {}).get("last") == "weights"
    whole = [saved.step for saved in summary.checkpoints if not (weights_only and saved.step >= steps)]
    if whole and whole[-1] > 0:
        newest, middle = whole[-1], whole[(len(whole) - 1) // 2]
        stopped = (values.get("training") or {}).get("stop_after") is not None
        whole_run = ["training.stop_after=null"] * stopped
        longer = whole_run or [f"training.steps={2 * max(steps, newest)}"]
        found.append(_next("extend", "titan-exp retry", name, *longer))
        end = middle + max(1, middle // 10)
        branch = [f"checkpoint.continue_step={middle}", f"training.steps={end}", *whole_run]
        decay = [f"lr_schedule.decay_steps={end - middle}", "lr_schedule.decay=linear"]
        found.append(_next("branch off a decay", "titan-exp retry", name, *branch, *decay))
    if summary.checkpoints:
        found.append(_next("generate", "titan-exp generate", name, "prompt=Once"))
        found.append(_next("evaluate", "titan-exp evaluate", name))
    before = [relative.run for relative in summary.parents[:1] if "://" not in relative.run]
    after = [relative.run for relative in summary.children]
    found.append(_next("compare", "titan-exp compare", *before, name, *after))
    if before or after:
        found.append(_next("differences", "titan-exp diff", *[*before, name, *after][:2]))
    return found


def _next(purpose: str, verb: str, *words: str) -> NextCommand:
    return NextCommand(purpose, f"{verb} {shlex.join(words)}")


WIDTH = 100
FILES = 10


def summary_lines(summary: RunSummary) -> Iterator[str]:
    """Lines of a summary; each part has a heading."""
    status = summary.status
    yield f"{'/'.join(Path(status.folder).absolute().parts[-2:])}  {status.folder}"
    code, changed = [str(part) for part in summary.code.parts], summary.code.changed
    if changed:
        names = ", ".join(changed[:FILES]) + (f" and {len(changed) - FILES} more" if len(changed) > FILES else "")
        code.append(f"{format_items(len(changed), 'file')} changed (diff.patch): {names}")
    parents = [f"continued from {parent.run} after step {parent.step}" for parent in summary.parents]
    children = [f"continued by {child.run} after step {child.step}" for child in summary.children]
    width = max((len(command.purpose) for command in summary.commands), default=0)
    parts = {
        "state": list(_state(status)),
        "differs from the defaults": command_lines("titan-exp train", summary.overrides),
        "code": code,
        "lineage": [*parents, *children],
        "attempts": [_attempt(attempt) for attempt in summary.attempts],
        "checkpoints": [f"step {saved.step}  {format_bytes(saved.bytes)}" for saved in summary.checkpoints],
        "commands": [f"{command.purpose:<{width}}  {command.command}" for command in summary.commands],
    }
    yield from _sections(parts)


def command_lines(command: str, overrides: Sequence[str], width: int = WIDTH) -> list[str]:
    """Command with overrides, wrapped at words as a shell reads it."""
    lines = [command]
    for word in map(for_shell, overrides):
        if len(lines[-1]) + len(word) + len(" ") + len(" \\") > width:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return lines


def _sections(parts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for heading, lines in parts.items():
        if lines:
            yield f"\n{heading}"
            yield from (f"  {line}" for line in lines)


def _state(status: StatusRow) -> Iterator[str]:
    steps = "?" if status.steps is None else status.steps
    waits = status.step == 0 and status.state in ("new", "queued", "unknown")
    yield f"{status.shown}, of {steps} steps" if waits else f"{status.shown} after step {status.step} of {steps}"
    if status.reason:
        yield from status.reason.splitlines()
    numbers = known_metrics(status.loss, status.validation_loss, status.tokens_per_second)
    if status.mfu is not None:
        numbers.append(f"MFU {status.mfu:.1%}")
    if status.seconds_left is not None:
        numbers.append(f"{format_duration(status.seconds_left)} left")
    if status.gpu_hours is not None:
        numbers.append(f"{status.gpu_hours:,.2f} GPU-hours")
    if numbers:
        yield ", ".join(numbers)
    yield from (f"{name} {value:.4g}" for name, value in status.reported.items() if value is not None)
    by_place: dict[str, list[str]] = {}
    for name, value in status.evaluated.items():
        place, _, metric = name.rpartition("/")
        by_place.setdefault(place, []).extend([f"{metric} {value:.4g}"] if value is not None else [])
    yield from (f"{place}: {', '.join(texts)}" if place else ", ".join(texts) for place, texts in by_place.items())


def _attempt(attempt: Attempt) -> str:
    began = attempt.start if attempt.start is not None else attempt.intent
    parts = [f"{attempt.attempt}  {format_time(began)}"]
    if attempt.start is not None and attempt.end is not None:
        parts.append(format_duration(max(0.0, attempt.end - attempt.start)))
    job = f", job {attempt.job_id}" if attempt.job_id and attempt.launched_by != "local" else ""
    more = f" and {len(attempt.hosts) - 1} more" * (len(attempt.hosts) > 1)
    hosts = "".join(f" on {host}{more}" for host in attempt.hosts[:1])  # unknown before the start
    parts.append(f"{format_items(attempt.world_size, 'process')}{hosts}{job}")
    if attempt.end is not None:
        ended = "ended without a record" if attempt.exit is None else ENDED_STATES.get(attempt.exit, "failed")
        reason = "" if not attempt.reason else f": {attempt.reason.splitlines()[0]}"
        parts.append(f"{shown_state(ended, attempt.reason)}{reason}")
    elif attempt.start is None:
        parts.append("not started")
    return "  ".join(parts)


NOT_THERE = "not there"
MACHINE = ("host", "executable", "cores", "cores_usable", "memory_gib")
"""Keys of the environment that differ between otherwise equal machines."""


@dataclass(frozen=True)
class Difference:
    """Key with its values in two runs."""

    key: str
    a: str
    b: str
    has_effect: bool = True


@dataclass(frozen=True)
class RunDiff:
    """Differences between the runs `a` and `b`."""

    a: str
    b: str
    configuration: tuple[Difference, ...]
    code: tuple[str, ...]  # one line per repository or package
    environment: tuple[Difference, ...]
    data: tuple[Difference, ...]  # identity and content of the training data as the ranks opened it
    unknown: tuple[str, ...]  # parts that one of the runs has not recorded

    @property
    def is_empty(self) -> bool:
        """True if the runs agree in everything that both have recorded."""
        return not (self.configuration or self.code or self.environment or self.data)


def diff_runs(a: Run, b: Run) -> RunDiff:
    """Compare two run folders. Raises UserError if a configuration cannot be read. Imports and resolves nothing."""
    runs = (a, b)
    configs, codes = [flatten(run.config) for run in runs], [run.code for run in runs]
    environments = [run.environment for run in runs]
    data = [next((row.data for row in reversed(run.attempts) if row.data is not None), None) for run in runs]
    names = ["/".join(run.folder.path.absolute().parts[-2:]) for run in runs]
    recorded = {"code": codes, "environment": environments, "data": data}
    unknown = [
        f"{part} of {name} is not recorded"
        for part, found in recorded.items()
        for name, record in zip(names, found, strict=True)
        if not record
    ]
    return RunDiff(
        *names,
        configuration=tuple(_differences(*configs)),
        code=tuple(code_changes(codes[0], codes[1])) if codes[0] and codes[1] else (),
        environment=tuple(_differences(*map(_environment, environments))) if all(environments) else (),
        data=tuple(_differences(*(flatten(found or {}) for found in data))) if all(data) else (),
        unknown=tuple(dict.fromkeys(unknown)),
    )


def diff_lines(diff: RunDiff) -> Iterator[str]:
    """Text of the differences, with values side by side."""
    yield from (f"a: {diff.a}", f"b: {diff.b}")
    parts = {
        "configuration": _side_by_side(diff.configuration),
        "code": list(diff.code),
        "environment": _side_by_side(diff.environment),
        "data": _side_by_side(diff.data),
    }
    yield from _sections(parts)
    same = [part for part, lines in parts.items() if not lines and not any(u.startswith(part) for u in diff.unknown)]
    if diff.is_empty:
        yield "\nnothing differs"
    if same:
        yield f"\nthe same: {', '.join(same)}"
    yield from diff.unknown


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key in dict.fromkeys([*a, *b]):
        if key not in a or key not in b or not same_value(a[key], b[key]):
            values = [shown(found[key]) if key in found else NOT_THERE for found in (a, b)]
            yield Difference(key, *values, has_effect=has_effect(key))


def _environment(record: Mapping[str, Any] | None) -> dict[str, Any]:
    found = {key: value for key, value in (record or {}).items() if key not in (*MACHINE, "packages", "environment")}
    packages, variables = (record or {}).get("packages") or {}, (record or {}).get("environment") or {}
    found.pop("torch", None)  # one of the packages
    settings = {f"${name}": value for name, value in variables.items() if not name.startswith("SLURM_")}
    return found | packages | settings


def _side_by_side(differences: Sequence[Difference]) -> list[str]:
    if not differences:
        return []
    rows = [("", "a", "b"), *((difference.key, difference.a, difference.b) for difference in differences)]
    widths = [max(len(row[place]) for row in rows) for place in range(2)]
    notes = ["", *("" if difference.has_effect else "  (does not change results)" for difference in differences)]
    return [
        f"{key:<{widths[0]}}  {a:<{widths[1]}}  {b}{note}".rstrip()
        for (key, a, b), note in zip(rows, notes, strict=True)
    ]
