"""`python -m titan_exp.launch.slurm.after RUN_FOLDER JOB CODE`: the batch script's last word on an attempt.

Ranks close the attempt themselves where they can; here the first of them to die says why, and the dead are written
down. Then: does the run go on by itself? The answer is the exit code.
"""

import os
import sys
import time
from collections.abc import Sequence

from titan_exp.config.cluster import ClusterConfig
from titan_exp.config.convert import load_experiment
from titan_exp.launch import verdict as verdicts
from titan_exp.launch.ending import close_attempt
from titan_exp.launch.rank_record import RankRecord, read_record
from titan_exp.launch.slurm.place import TOKEN
from titan_exp.launch.verdict import Verdict
from titan_exp.tracking.attempts import Attempt
from titan_exp.tracking.run_folder import RunFolder
from titan_exp.tracking.run_state import DONE, FAILED, STOPPED

HUNG = 86
"""Exit code of a rank that its watchdog ended, because nothing moved any more."""
CANCELLED = "cancelled"
"""Begins the reason of a stop after which the run shall not go on by itself."""
ENDED_BY_HAND = 130
"""Exit code of a run that somebody cancelled, as shells have it for Ctrl-C."""


def main(arguments: Sequence[str]) -> int:
    """Close the attempt of this job; returns 0 where the run is done, 85 where it shall go on, else a failure's code.

    Args:
        arguments: the run folder, the job's number, and the exit code of srun.
    """
    folder, job, code = RunFolder(arguments[0]), arguments[1], int(arguments[2])
    rows = folder.read_attempts()
    row = rows[-1] if rows else None
    if row is None or row.token != os.environ.get(TOKEN):
        print(f"{folder.path}: job {job} has no start written down; another one came after it.")
        return code
    if row.start is None:
        return _close_unstarted(folder, row, job, code)
    verdict = _verdict(folder, row, code)
    close_attempt(folder, row.attempt, verdict.state, exit_code=verdict.exit_code, reason=verdict.reason, overrule=True)
    if verdict.detail:
        print(verdict.detail)
    return _go_on(folder, row, job, verdict, load_experiment(folder.config).cluster)


def _verdict(folder: RunFolder, row: Attempt, code: int) -> Verdict:
    records = {rank: read_record(folder, row.attempt, rank) for rank in range(row.world_size)}
    known = [record for record in records.values() if record is not None]
    hung = [record for record in known if record.exit == HUNG]
    if hung:
        return Verdict("preempted", HUNG, verdicts.failed([verdicts.death_by_error(hung[0])]).reason)
    died = [verdicts.death_by_error(record) for record in known if record.failed]
    if died:
        return verdicts.failed(died)
    ends = [record.exit for record in known if record.exit is not None]
    if len(ends) == row.world_size:
        return verdicts.ended(ends, folder.stop_reason())
    stop = folder.stop_reason()
    if stop is not None:
        return Verdict("preempted", STOPPED, f"{stop}; killed before all ranks had saved")
    return verdicts.failed(
        _missing(folder, row, rank, record) for rank, record in records.items() if not _ended(record)
    )


def _missing(folder: RunFolder, row: Attempt, rank: int, record: RankRecord | None) -> verdicts.Death:
    log = folder.attempt_logs(row.attempt) / f"rank-{rank:05d}.log"
    if record is None:
        # It says less than the death of one that had begun, and may only be a consequence of it.
        return verdicts.death_at_start(rank, time.time() + 1, log)
    return verdicts.death_by_signal(rank, time.time(), log)


def _ended(record: RankRecord | None) -> bool:
    return record is not None and record.exit is not None


def _close_unstarted(folder: RunFolder, row: Attempt, job: str, code: int) -> int:
    """No rank came to write down a start: the run was done, is held by somebody else, or Python did not even start."""
    state = folder.read_state()
    if state is not None and state.state == "done":
        folder.update_attempt(row.attempt, job_id=job, end=time.time(), reason="the run was done before this start")
        return DONE
    holder, code = folder.holder(), code or FAILED
    logs = folder.logs / f"slurm-{job}-{os.environ.get('SLURM_RESTART_COUNT', '0')}-rank-00000.log"
    print(verdicts.tail(logs))
    if holder is not None:
        reason = f"the run is held by {holder}"
        folder.update_attempt(row.attempt, job_id=job, end=time.time(), exit=code, reason=reason)
        return code
    folder.update_attempt(row.attempt, job_id=job)
    reason = f"no rank started (srun ended with exit code {code})"
    close_attempt(folder, row.attempt, "failed", exit_code=code, reason=reason, overrule=True)
    return code


def _go_on(folder: RunFolder, row: Attempt, job: str, verdict: Verdict, cluster: ClusterConfig) -> int:
    """Say how the attempt ended and, where the run shall go on, write down the intent to."""
    said = f"{folder.path}: attempt {row.attempt} {verdict.state}" + (f" ({verdict.reason})" if verdict.reason else "")
    if verdict.exit_code not in (STOPPED, HUNG):
        print(said)
        return verdict.exit_code
    if (folder.stop_reason() or "").startswith(CANCELLED):
        print(said)
        return ENDED_BY_HAND
    if cluster.requeue == "never":
        print(f"{said}; cluster.requeue=never: the command that submitted it continues it.")
        return verdict.exit_code
    if row.requeues >= cluster.max_requeues:
        print(f"{said}; it went on by itself {row.requeues} times (cluster.max_requeues): submit it again.")
        return FAILED
    folder.add_attempt(
        world_size=row.world_size,
        hosts=(),
        job_id=None if cluster.requeue == "chain" else job,
        launched_by="slurm",
        token=row.token,
        requeues=row.requeues + 1,
    )
    print(f"{said}; it goes on by itself, {row.requeues + 1} of {cluster.max_requeues} times.")
    return STOPPED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
