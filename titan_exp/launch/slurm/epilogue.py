"""Batch script epilogue: `python -m titan_exp.launch.slurm.epilogue RUN_FOLDER JOB CODE`.

Closes the attempt with its cause, from the rank records and srun's log. Exit code 85 requeues the run.
"""

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from titan_exp.config.groups.cluster import ClusterConfig
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.launch.health.hang_report import HangFiles
from titan_exp.launch.rank.rank_env import TOKEN
from titan_exp.launch.rank.rank_status import RankRecord, read_record
from titan_exp.launch.state import exit_status
from titan_exp.launch.state.close_attempt import close_attempt
from titan_exp.launch.state.exit_status import AttemptResult
from titan_exp.tracking.run_folder.attempts import Attempt
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.run_folder.state import DONE, FAILED, HUNG, STOPPED

CANCELLED = "cancelled"
"""Prefix of stop reasons that prevent a requeue."""
ENDED_BY_HAND = 130
"""Exit code of a cancelled run, as after Ctrl-C."""


def main(arguments: Sequence[str]) -> int:
    """Close the attempt of this job; returns 0 if the run is done, 85 to requeue it, else the failure's exit code.

    `arguments` are the run folder, the job id and srun's exit code.
    """
    folder, job, code = RunFolder(arguments[0]), arguments[1], int(arguments[2])
    rows = folder.read_attempts()
    row = rows[-1] if rows else None
    if row is None or row.token != os.environ.get(TOKEN):
        print(f"{folder.path}: job {job} has no recorded attempt; a newer job replaced it.")
        return code
    if row.start is None:
        return _close_unstarted(folder, row, job, code)
    result = _result(folder, row, job)
    close_attempt(folder, row.attempt, result.state, exit_code=result.exit_code, reason=result.reason, overrule=True)
    if result.detail:
        print(result.detail)
    return _requeue(folder, row, job, result, load_experiment(folder.config, trust=True).cluster)


def _result(folder: RunFolder, row: Attempt, job: str) -> AttemptResult:
    records = {rank: read_record(folder, row.attempt, rank) for rank in range(row.world_size)}
    known = [record for record in records.values() if record is not None]
    hang = HangFiles(folder.attempt_logs(row.attempt), row.world_size).report_hang()
    if hang is not None:
        return replace(exit_status.hung(hang), state="preempted")
    failures = [exit_status.failure_from_error(record) for record in known if record.failed]
    if failures:
        return exit_status.failed(failures)
    codes = [record.exit for record in known if record.exit is not None]
    stop = folder.stop_reason()
    if len(codes) == row.world_size:
        return exit_status.ended(codes, stop)
    # srun sends SIGTERM to the peers of a failed rank, which record it as a stop request.
    if stop is not None and not re.fullmatch(r"rank \d+ received SIGTERM", stop):
        return AttemptResult("preempted", STOPPED, f"{stop}; killed before all ranks had saved")
    return _killed(folder, row, job, records)


def _killed(folder: RunFolder, row: Attempt, job: str, records: Mapping[int, RankRecord | None]) -> AttemptResult:
    """Failure of a rank killed without a record: srun's log gives the first one and the signal."""
    missing = [rank for rank, record in records.items() if record is None or record.exit is None]
    reported = (entry for entry in _srun_errors(folder, job) if entry[0] in missing)
    rank, message = next(reported, (missing[0], ""))
    log = folder.attempt_logs(row.attempt) / f"rank-{rank:05d}.log"
    kind = exit_status.failure_at_start if records[rank] is None else exit_status.failure_from_signal
    failure = kind(rank, time.time(), log)
    return exit_status.failed([replace(failure, reason=failure.reason + (f" (srun: {message})" if message else ""))])


def _srun_errors(folder: RunFolder, job: str) -> Iterator[tuple[int, str]]:
    """Ranks and srun's error messages since the job's last start, in order."""
    try:
        text = (folder.logs / f"slurm-{job}.out").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    since_start = re.split(r": attempt \d+ \w+", text)[-1]
    for number, message in re.findall(r"srun: error: \S+: tasks? (\d+)[\d,-]*: (.+)", since_start):
        yield int(number), message.strip()


def _close_unstarted(folder: RunFolder, row: Attempt, job: str, code: int) -> int:
    """Close an attempt without a recorded start: the run was done, another process held it, or Python did not start."""
    state = folder.read_state()
    if state is not None and state.state == "done":
        folder.update_attempt(row.attempt, job_id=job, end=time.time(), reason="the run was done before this start")
        return DONE
    holder, code = folder.holder(), code or FAILED
    logs = folder.logs / f"slurm-{job}-{os.environ.get('SLURM_RESTART_COUNT', '0')}-rank-00000.log"
    print(exit_status.tail(logs))
    if holder is not None:
        reason = f"the run is held by {holder}"
        folder.update_attempt(row.attempt, job_id=job, end=time.time(), exit=code, reason=reason)
        return code
    folder.update_attempt(row.attempt, job_id=job)
    reason = f"no rank started (srun ended with exit code {code})"
    close_attempt(folder, row.attempt, "failed", exit_code=code, reason=reason, overrule=True)
    return code


def _requeue(folder: RunFolder, row: Attempt, job: str, result: AttemptResult, cluster: ClusterConfig) -> int:
    """Print the result and record the intent of a requeue; returns the exit code."""
    text = f"{folder.path}: attempt {row.attempt} {result.state}" + (f" ({result.reason})" if result.reason else "")
    if result.exit_code not in (STOPPED, HUNG):
        print(text)
        return result.exit_code
    if (folder.stop_reason() or "").startswith(CANCELLED):
        print(text)
        return ENDED_BY_HAND
    if cluster.requeue == "never":
        print(f"{text}; cluster.requeue=never: the command that submitted it continues it.")
        return result.exit_code
    if row.requeues >= cluster.max_requeues:
        print(f"{text}; requeued {row.requeues} times already (cluster.max_requeues): submit it again.")
        return FAILED
    folder.add_attempt(
        world_size=row.world_size,
        hosts=(),
        job_id=None if cluster.requeue == "chain" else job,
        launched_by=row.launched_by,
        token=row.token,
        requeues=row.requeues + 1,
    )
    print(f"{text}; requeued, {row.requeues + 1} of {cluster.max_requeues} times.")
    return STOPPED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
