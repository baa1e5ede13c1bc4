"""Batch script epilogue: `python -m titan_exp.launch.slurm.epilogue RUN_FOLDER JOB CODE`.

Closes the attempt with its cause, from the rank records and srun's log. Exit code 85 requeues the run.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from titan_exp.config.groups.run import ClusterConfig
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.launch import attempt_end
from titan_exp.launch.attempt_end import AttemptResult, RankFailure, close_attempt, requeues_after
from titan_exp.launch.rank.rank_env import TOKEN, RankRecord, read_record
from titan_exp.launch.slurm.squeue import SrunLog, parse_srun_log
from titan_exp.launch.watchdog import HangFiles
from titan_exp.tracking.display import format_items
from titan_exp.tracking.run_folder.run_folder import DONE, FAILED, HUNG, STOPPED, Attempt, RunFolder, shown_state

CANCELLED = "cancelled"  # prefix of stop reasons that prevent a requeue
ENDED_BY_HAND = 130  # exit code of a cancelled run, as after Ctrl-C
SIGNALLED = 128  # offset that the shell adds to the number of the signal that ended a command
MORE_MEMORY = "ask for more with cluster.memory_gb (0: all of the node), or "


def main(arguments: Sequence[str]) -> int:
    """Close the attempt of a job, given a run folder, the job id and srun's exit code. Returns 0 if the run is done, 85
    to requeue it, else the failure's exit code."""
    folder, job, code = RunFolder(arguments[0]), arguments[1], int(arguments[2])
    row = own_attempt(folder, job)
    if row is None:
        return code or FAILED
    if row.start is None:
        return _close_unstarted(folder, row, job, code)
    result = attempt_result(folder, row, job, code)
    close_attempt(folder, row.attempt, result)
    if result.detail:
        print(result.detail)
    return requeue(folder, row, job, result, load_experiment(folder.config, trust=True).cluster)


def own_attempt(folder: RunFolder, job: str) -> Attempt | None:
    """The run's newest attempt if this job has it; else None, after printing why."""
    if not folder.config.exists():
        print(f"{folder.path}: somebody deleted or moved the run folder, so job {job} ends and does not requeue.")
        return None
    rows = folder.read_attempts()
    if not rows or rows[-1].token != os.environ.get(TOKEN):
        print(f"{folder.path}: somebody started this run anew meanwhile, so job {job} ends and does not requeue.")
        return None
    return rows[-1]


def attempt_result(folder: RunFolder, row: Attempt, job: str, code: int) -> AttemptResult:
    """Result of the attempt; `code` is srun's."""
    records = {rank: read_record(folder, row.attempt, rank) for rank in range(row.world_size)}
    hang = HangFiles(folder.attempt_logs(row.attempt), row.world_size).report_hang()
    if hang is not None:
        return replace(attempt_end.hung(hang), state="preempted")
    codes = [record.exit for record in records.values() if record is not None and record.exit is not None]
    if len(codes) < row.world_size:
        return _cut_short(folder, row, job, code, records)
    failures = [attempt_end.failure_from_error(record) for record in records.values() if record and record.failed]
    return attempt_end.failed(failures) if failures else attempt_end.ended(codes, folder.stop_reason())


def _cut_short(
    folder: RunFolder, row: Attempt, job: str, code: int, records: Mapping[int, RankRecord | None]
) -> AttemptResult:
    """Result of an attempt with ranks that recorded no end, since a killed rank writes no record, and its peers record
    the broken collective. The cause is the first of these that exists: a failure other than a broken collective, unless
    srun first reported a rank without a record; a stop request; such a rank; a broken collective."""
    failures = [attempt_end.failure_from_error(record) for record in records.values() if record and record.failed]
    log = parse_srun_log(_read(folder.logs / f"slurm-{job}.out"))
    silent = [rank for rank, record in records.items() if record is None or not (record.end or record.signal)]
    exits = [task for task in log.exits if task.rank in silent]
    causes = [failure for failure in failures if not failure.broken_collective]
    if causes and not any(task.first for task in exits):
        return attempt_end.failed(causes)
    stop = folder.stop_reason()
    # srun sends SIGTERM to the peers of a failed rank, which record it as a stop request.
    by_srun = re.fullmatch(r"rank \d+ received SIGTERM", stop or "") is not None
    if stop is not None and (not by_srun or not (exits or silent or failures)):
        return AttemptResult("preempted", STOPPED, f"{stop}, and killed before all ranks had saved")
    step = _ended_step(log, code) if not failures else None
    if step is not None:
        return AttemptResult("failed", FAILED, step)
    if silent or not failures:
        missing = [rank for rank, record in records.items() if record is None or record.end is None]
        rank, message = (exits[0].rank, exits[0].message) if exits else ((silent or missing)[0], "")
        failures = [_unrecorded(folder, row, rank, records[rank], message, out_of_memory=log.out_of_memory)]
    return attempt_end.failed(failures)


def _ended_step(log: SrunLog, code: int) -> str | None:
    if log.aborted and log.out_of_memory:
        return f"the job step ran out of host memory, so SLURM ended it: {MORE_MEMORY}{attempt_end.LESS_MEMORY}"
    if log.aborted:
        return "SLURM ended the job step, because of scancel or because a node failed"
    if code > SIGNALLED and not log.exits:
        signal_name = signal.strsignal(code - SIGNALLED) or code
        return f"a signal ended srun ({signal_name}), and the ranks with it"
    return None


def _unrecorded(
    folder: RunFolder, row: Attempt, rank: int, record: RankRecord | None, message: str, *, out_of_memory: bool
) -> RankFailure:
    """Failure of a rank that recorded no end; `message` is srun's, empty without one."""
    path = folder.attempt_logs(row.attempt) / f"rank-{rank:05d}.log"
    if out_of_memory or (record is not None and message in ("", "Killed")):
        failure = attempt_end.failure_from_signal(
            rank, time.time(), path, out_of_memory=out_of_memory, more_memory=MORE_MEMORY
        )
    elif record is None:
        failure = attempt_end.failure_at_start(rank, time.time(), path)
    else:
        # It ended in native code, for example by a segmentation fault.
        reason = f"rank {rank} ended without a traceback"
        failure = RankFailure(rank, time.time(), FAILED, reason, attempt_end.tail(path))
    return replace(failure, reason=failure.reason + (f" (srun: {message})" if message else ""))


def _read(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _close_unstarted(folder: RunFolder, row: Attempt, job: str, code: int) -> int:
    """Close an attempt without a recorded start: the run was done, another process held it, or Python did not start."""
    state = folder.read_state()
    if state is not None and state.state == "done":
        folder.update_attempt(row.attempt, job_id=job, end=time.time(), reason="the run was done before this start")
        return DONE
    holder, code = folder.holder(), code or FAILED
    logs = folder.logs / f"slurm-{job}-{os.environ.get('SLURM_RESTART_COUNT', '0')}-rank-00000.log"
    print(attempt_end.tail(logs))
    if holder is not None:
        reason = f"{holder} holds the run"
        folder.update_attempt(row.attempt, job_id=job, end=time.time(), exit=code, reason=reason)
        return code
    folder.update_attempt(row.attempt, job_id=job)
    log = parse_srun_log(_read(folder.logs / f"slurm-{job}.out"))
    why = f"srun ended with exit code {code}"
    if log.exits:
        why = f"srun: rank {log.exits[0].rank}: {log.exits[0].message}"
    remedy = f", since host memory ran out: {MORE_MEMORY}{attempt_end.LESS_MEMORY}" if log.out_of_memory else ""
    close_attempt(folder, row.attempt, AttemptResult("failed", code, f"no rank started ({why}){remedy}"))
    return code


def requeue(folder: RunFolder, row: Attempt, job: str, result: AttemptResult, cluster: ClusterConfig) -> int:
    """Print the result and record the intent of a requeue; returns the exit code."""
    text = f"{folder.path}: attempt {row.attempt} {shown_state(result.state, result.reason)}"
    text += f" ({result.reason})" if result.reason else ""
    if result.exit_code not in (STOPPED, HUNG):
        print(text)
        return result.exit_code
    if (folder.stop_reason() or "").startswith(CANCELLED):
        print(text)
        return ENDED_BY_HAND
    if cluster.requeue == "never":
        what = "With cluster.requeue=never it does not requeue: type the command that submitted it to continue."
        print(f"{text}. {what}")
        return result.exit_code
    requeues = requeues_after(folder, row)
    if requeues > cluster.max_requeues:
        why = (
            f"not requeued: {format_items(requeues, 'attempt')} in a row wrote no new checkpoint (cluster.max_requeues="
            f"{cluster.max_requeues}). To submit it again, type titan-exp train --config-path {folder.path}"
        )
        close_attempt(folder, row.attempt, replace(result, reason=f"{result.reason}, {why}"))
        print(f"{text}, {why}")
        return FAILED
    folder.add_attempt(
        world_size=row.world_size,
        hosts=(),
        job_id=None if cluster.requeue == "chain" else job,
        launched_by=row.launched_by,
        token=row.token,
        requeues=requeues,
    )
    without = f" {requeues} of {cluster.max_requeues} times without a new checkpoint" if requeues else ""
    print(f"{text}, requeued{without}.")
    return STOPPED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
