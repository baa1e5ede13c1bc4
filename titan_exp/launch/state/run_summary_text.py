"""Text of `titan-exp show`."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from titan_exp.launch.provenance.recorded_code import RecordedCode
from titan_exp.launch.state.run_status import StatusRow
from titan_exp.launch.state.run_summary import RunSummary
from titan_exp.launch.summary import known_metrics
from titan_exp.tracking.number_format import format_bytes, format_duration, format_items
from titan_exp.tracking.run_folder.attempts import ENDED_STATES, Attempt
from titan_exp.tracking.run_folder.provenance_records import for_shell

WIDTH = 100
FILES = 10
"""Maximum number of listed files."""


def summary_lines(summary: RunSummary) -> Iterator[str]:
    """Lines of a summary, a heading before each part."""
    status = summary.status
    yield f"{'/'.join(Path(status.folder).absolute().parts[-2:])}  {status.folder}"
    yield from _section("state", list(_state(status)))
    yield from _section("differs from the defaults", command_lines("titan-exp train", summary.overrides))
    yield from _section("code", list(_code(summary.code)))
    parents = [f"continued from {parent.run} after step {parent.step}" for parent in summary.parents]
    children = [f"continued by {child.run} after step {child.step}" for child in summary.children]
    yield from _section("lineage", [*parents, *children])
    yield from _section("attempts", [_attempt(attempt) for attempt in summary.attempts])
    sizes = [f"step {saved.step}  {format_bytes(saved.bytes)}" for saved in summary.checkpoints]
    yield from _section("checkpoints", sizes)
    width = max((len(command.purpose) for command in summary.commands), default=0)
    commands = [f"{command.purpose:<{width}}  {command.command}" for command in summary.commands]
    yield from _section("commands", commands)


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


def _section(heading: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"\n{heading}"
        yield from (f"  {line}" for line in lines)


def _state(status: StatusRow) -> Iterator[str]:
    steps = "?" if status.steps is None else status.steps
    waits = status.step == 0 and status.state in ("new", "queued", "unknown")
    yield f"{status.state}, of {steps} steps" if waits else f"{status.state} after step {status.step} of {steps}"
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


def _code(code: RecordedCode) -> Iterator[str]:
    yield from map(str, code.parts)
    if code.changed:
        more = len(code.changed) - FILES
        names = ", ".join(code.changed[:FILES]) + (f" and {more} more" if more > 0 else "")
        yield f"{format_items(len(code.changed), 'file')} changed (diff.patch): {names}"


def _attempt(attempt: Attempt) -> str:
    began = attempt.start if attempt.start is not None else attempt.intent
    parts = [f"{attempt.attempt}  {time.strftime('%Y-%m-%d %H:%M', time.localtime(began))}"]
    if attempt.start is not None and attempt.end is not None:
        parts.append(format_duration(max(0.0, attempt.end - attempt.start)))
    job = f", job {attempt.job_id}" if attempt.job_id and attempt.launched_by != "local" else ""
    more = f" and {len(attempt.hosts) - 1} more" * (len(attempt.hosts) > 1)
    hosts = "".join(f" on {host}{more}" for host in attempt.hosts[:1])  # unknown before the start
    parts.append(f"{format_items(attempt.world_size, 'process')}{hosts}{job}")
    if attempt.end is not None:
        ended = "ended without a record" if attempt.exit is None else ENDED_STATES.get(attempt.exit, "failed")
        reason = "" if not attempt.reason else f": {attempt.reason.splitlines()[0]}"
        parts.append(f"{ended}{reason}")
    elif attempt.start is None:
        parts.append("not started")
    return "  ".join(parts)
