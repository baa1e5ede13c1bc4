"""Show a run's log (-f follows); for a study, the errors of failed runs."""

import shlex
import time
from collections.abc import Sequence

from titan_exp.config.command_line.options import options_help, take_options
from titan_exp.config.command_line.verb_options import LogsOptions
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.foreign_file import FILE_BYTES
from titan_exp.launch.attempt_end import TAIL
from titan_exp.launch.executor import typed_path
from titan_exp.launch.rank.rank_env import read_record
from titan_exp.launch.run_lookup import RunEntry, find_runs, named_runs, require_one, runs_folder
from titan_exp.launch.run_status import run_status, run_statuses
from titan_exp.tracking.display import format_bytes, format_duration, format_items, format_time
from titan_exp.tracking.run_folder.files import FileTail, last_lines
from titan_exp.tracking.run_folder.run_folder import RunFolder

USAGE = """\
titan-exp logs: show the log of a run, or the errors of the failed runs of a study.

  titan-exp logs RUN       the last attempt: the first rank that failed, or rank 0 (for a queued run, what it waits for)
  titan-exp logs -f RUN    follow it
  titan-exp logs NAME      the errors of a study's failed runs

RUN is a path, an id prefix, STUDY/LABEL or a URL."""
HELP_TEXT = options_help(USAGE, LogsOptions)
EVERY = 0.25
FAILED = ("failed", "lost", "unreadable")


def run(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    options, rest = take_options(LogsOptions, ["--follow" if word == "-f" else word for word in argv])
    runs, named = runs_folder(options.runs), named_runs(rest)
    if not named:
        raise UserError("Name a run: titan-exp logs RUN (titan-exp status lists runs).")
    found = find_runs(named, runs)
    follow, rank, attempt = options.follow, options.rank, options.attempt
    if len(found) > 1:
        if follow or any(choice is not None for choice in (rank, attempt, options.group)):
            require_one(found, " ".join(named))
        return _show_failures(found)
    (entry,) = found
    if not entry.folder.path.is_dir() or not _last_attempt(entry.folder):
        remedy = f"Start it with {entry.start_command}."
        raise UserError(f"{entry.label}: this run has not started yet and has no log. {remedy}")
    if attempt is None and (queued := _queued(entry.folder)) is not None:
        if not follow:
            name = shlex.quote(typed_path(entry.folder.path))
            remedy = f"To follow it once it starts, type titan-exp logs -f {name}."
            raise UserError(f"{name} has no log yet: {queued}. {remedy}")
        print(f"==> {queued} <==", flush=True)
    folder = _group_folder(entry.folder, attempt, options.group)
    try:
        if follow:
            _follow(folder, rank or 0, attempt)
        else:
            _show(folder, rank, attempt)
    except KeyboardInterrupt:
        return 130
    return 0


def _queued(folder: RunFolder) -> str | None:
    """Time since which a run waits in a queue, and why; None if it does not wait, or has started meanwhile."""
    row = folder.read_attempts()[-1]
    if row.start is not None or (status := run_status(folder)).state != "queued":
        return None
    waited, before = format_duration(max(0.0, time.time() - row.intent)), row.attempt - 1
    known = [f"queued since {format_time(row.intent)}, {waited} ago", status.job_id and f"job {status.job_id}"]
    known.append(status.reason)
    if folder.attempt_logs(before).is_dir():
        known.append(f"after attempt {before} (to see that one, add --attempt={before})")
    return ", ".join(filter(None, known))


def _group_folder(folder: RunFolder, attempt: int | None, group: int | None) -> RunFolder:
    """Run folder with the logs of a world's newest start; the folder itself if the attempt has one world."""
    number = attempt or _last_attempt(folder)
    starts = {int(name.split("-")[1]): name for name in folder.world_logs(number)} if number else {}
    if group is not None and group not in starts:
        known = f"it has groups {', '.join(map(str, sorted(starts)))}" if starts else "this run has no groups"
        raise UserError(f"--group {group}: there is no such group, since {known}.")
    if not starts:
        return folder
    views = {of: folder.with_world(name) for of, name in sorted(starts.items())}
    if group is not None:
        return views[group]
    failed = [of for of, view in views.items() if _first_to_fail(view, number) is not None]
    return views[[*failed, *views][0]]


def _show(folder: RunFolder, rank: int | None, attempt: int | None) -> None:
    last = _last_attempt(folder)
    number = last if attempt is None else attempt
    if attempt is not None and not 1 <= attempt <= last:
        known = f"1{f' to {last}' if last > 1 else ''}"
        raise UserError(f"--attempt {attempt}: this run has {format_items(last, 'attempt')}, so use --attempt {known}.")
    chosen = rank if rank is not None else _first_to_fail(folder, number) or 0
    path = folder.attempt_logs(number) / f"rank-{chosen:05d}.log"
    if not path.exists():
        ranks = sorted(int(log.stem[5:]) for log in path.parent.glob("rank-*.log"))
        known = f"it has ranks {ranks[0]} to {ranks[-1]}" if ranks else f"attempt {number} has no logs yet"
        state = folder.read_state()
        reason = f"\n  {state.reason}" if state is not None and state.reason else ""
        raise UserError(f"{path}: there is no such log, since {known}.{reason}")
    print(f"==> {path} <==")
    tail = FileTail(path, most=FILE_BYTES)
    if tail.skipped:
        print(f"==> without its first {format_bytes(tail.skipped)} <==")
    for line in tail.lines(torn=True):
        print(line)


def _follow(folder: RunFolder, rank: int, attempt: int | None) -> None:
    last = _last_attempt(folder)
    number = max(1, last if attempt is None else attempt)
    follower, announced = _log(folder, number, rank), False
    while True:
        newest = _last_attempt(folder)
        ended = newest > number or not (run_status(folder).active)  # this is checked before the last lines are read
        for line in follower.lines():
            if not announced:
                print(f"==> attempt {number}, rank {rank} <==", flush=True)
                announced = True
            print(line, flush=True)
        if newest > number and attempt is None:
            number, announced = number + 1, False
            follower = _log(folder, number, rank)
        elif ended:
            now = run_status(folder)
            print(f"==> {now.shown}{f': {now.reason}' if now.reason else ''} <==")
            return
        else:
            time.sleep(EVERY)


def _log(folder: RunFolder, attempt: int, rank: int) -> FileTail:
    return FileTail(folder.attempt_logs(attempt) / f"rank-{rank:05d}.log")


def _show_failures(found: Sequence[RunEntry]) -> int:
    statuses = run_statuses([entry.folder for entry in found])
    failed = [entry for entry in found if statuses[entry.folder.path].state in FAILED]
    if not failed:
        print(f"None of the {len(found)} runs failed or was lost.")
        return 0
    for entry in failed:
        state = statuses[entry.folder.path]
        print(f"\n==> {entry.label}  {entry.folder.path} <==")
        print(f"{state.shown} after step {state.step}: {state.reason or 'we do not know why'}")
        number = max(1, state.attempt)
        rank = _first_to_fail(entry.folder, number) or 0
        path = _group_folder(entry.folder, number, None).attempt_logs(number) / f"rank-{rank:05d}.log"
        for line in last_lines(path, TAIL):
            print(line)
    return 0


def _last_attempt(folder: RunFolder) -> int:
    attempts = folder.read_attempts()
    return attempts[-1].attempt if attempts else 0


def _first_to_fail(folder: RunFolder, attempt: int) -> int | None:
    ranks = [int(path.stem[5:]) for path in folder.attempt_logs(attempt).glob("rank-*.json")]
    records = [record for rank in ranks if (record := read_record(folder, attempt, rank)) is not None]
    failed = [record for record in records if record.failed]
    return min(failed, key=lambda record: record.end or 0.0).rank if failed else None
