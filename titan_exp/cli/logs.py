"""Show a run's log (-f follows); for a study, the errors of failed runs."""

import time
from collections.abc import Sequence

from titan_exp.config.command_line.options import take_flags
from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.rank.rank_status import RankRecord, read_record
from titan_exp.launch.state.exit_status import TAIL
from titan_exp.launch.state.run_lookup import RunEntry, find_runs, split_runs_folder
from titan_exp.launch.state.run_status import run_status, run_statuses
from titan_exp.launch.state.tail import FileTail
from titan_exp.tracking.run_folder.run_folder import RunFolder

HELP_TEXT = """\
titan-exp logs: what a run printed.

  titan-exp logs RUN                 the last start: rank 0, or the first rank to fail
  titan-exp logs -f RUN              and what it prints from now on, through later starts, until it has ended
  titan-exp logs RUN --rank 3        another rank
  titan-exp logs RUN --attempt 1     an earlier start
  titan-exp logs NAME                of a study: how its failed runs ended

RUN is a path, the beginning of an id, or STUDY/LABEL.
"""
EVERY = 0.25
"""Seconds between looks at a file that is followed."""
TROUBLED = ("failed", "lost", "unreadable")


def run(words: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    flags, rest = take_flags(words, ("-f", "--follow"), {"--rank": int, "--attempt": int}, verb="logs")
    runs, named = split_runs_folder(rest)
    if not named:
        raise UserError("The logs of what? titan-exp logs RUN; titan-exp status shows what there is.")
    found = find_runs(named, runs)
    follow = "-f" in flags or "--follow" in flags
    rank = int(flags["--rank"]) if "--rank" in flags else None
    attempt = int(flags["--attempt"]) if "--attempt" in flags else None
    if len(found) > 1:
        if follow or rank is not None or attempt is not None:
            labels = "\n".join(f"  {one.label}  {one.folder.path.name}" for one in found[:8])
            raise UserError(f"{' '.join(named)}: {len(found)} runs are meant. Name one of them:\n{labels}")
        return _show_failures(found)
    (one,) = found
    if not one.folder.path.is_dir():
        raise UserError(f"{one.label}: this run has not been started yet, so it has printed nothing.")
    if follow:
        try:
            _follow(one.folder, rank or 0, attempt)
        except KeyboardInterrupt:
            return 130
        return 0
    _show(one.folder, rank, attempt)
    return 0


def _show(folder: RunFolder, rank: int | None, attempt: int | None) -> None:
    number = _attempt(folder, attempt)
    chosen = rank if rank is not None else _first_to_fail(folder, number) or 0
    path = folder.attempt_logs(number) / f"rank-{chosen:05d}.log"
    if not path.exists():
        there = sorted(int(it.stem[5:]) for it in path.parent.glob("rank-*.log"))
        has = f"it has ranks {there[0]} to {there[-1]}" if there else f"attempt {number} has printed nothing yet"
        state = folder.read_state()
        reason = f"\n  {state.reason}" if state is not None and state.reason else ""
        raise UserError(f"{path}: there is no such log; {has}.{reason}")
    print(f"==> {path} <==")
    print(path.read_text(encoding="utf-8", errors="replace"), end="")


def _follow(folder: RunFolder, rank: int, attempt: int | None) -> None:
    """Print lines as they come, until the run, or the attempt that was asked for, has ended."""
    last = _last_attempt(folder)
    number = max(1, last if attempt is None else attempt)
    follower, announced = _log(folder, number, rank), False
    while True:
        newest = _last_attempt(folder)
        ended = newest > number or not (run_status(folder).active)  # asked before the last lines are read
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
            print(f"==> {now.state}{f': {now.reason}' if now.reason else ''} <==")
            return
        else:
            time.sleep(EVERY)


def _log(folder: RunFolder, attempt: int, rank: int) -> FileTail:
    return FileTail(folder.attempt_logs(attempt) / f"rank-{rank:05d}.log")


def _show_failures(found: Sequence[RunEntry]) -> int:
    now = run_statuses([one.folder for one in found])
    troubled = [one for one in found if now[one.folder.path].state in TROUBLED]
    if not troubled:
        print(f"None of the {len(found)} runs failed or was lost.")
        return 0
    for one in troubled:
        state = now[one.folder.path]
        print(f"\n==> {one.label}  {one.folder.path} <==")
        print(f"{state.state} after step {state.step}: {state.reason or 'for no known reason'}")
        number = max(1, state.attempt)
        rank = _first_to_fail(one.folder, number) or 0
        path = one.folder.attempt_logs(number) / f"rank-{rank:05d}.log"
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            print("\n".join(lines[-TAIL:]))
    return 0


def _attempt(folder: RunFolder, asked: int | None) -> int:
    last = _last_attempt(folder)
    if not last:
        raise UserError(f"{folder.path}: this run has not been started yet, so it has printed nothing.")
    if asked is None:
        return last
    if not 1 <= asked <= last:
        raise UserError(
            f"--attempt {asked}: this run was started {last} time(s): --attempt 1{f' to {last}' if last > 1 else ''}."
        )
    return asked


def _last_attempt(folder: RunFolder) -> int:
    attempts = folder.read_attempts()
    return attempts[-1].attempt if attempts else 0


def _first_to_fail(folder: RunFolder, attempt: int) -> int | None:
    """The rank that failed first; None where none did."""
    ranks = [int(path.stem[5:]) for path in folder.attempt_logs(attempt).glob("rank-*.json")]
    records = [record for rank in ranks if (record := read_record(folder, attempt, rank)) is not None]
    failed = [record for record in records if record.failed]
    return min(failed, key=_end).rank if failed else None


def _end(record: RankRecord) -> float:
    return record.end or 0.0
