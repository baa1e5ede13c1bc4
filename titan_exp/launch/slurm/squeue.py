"""Job states from squeue and sacct, many jobs per query, with a timeout."""

import contextlib
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_exp.launch.slurm.script import MARK

TIMEOUT = 20.0
"""Seconds for SLURM to answer; its commands wait while the controller is down."""

QUEUED = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")


@dataclass(frozen=True)
class Job:
    """A job, or a task of an array, as squeue lists it."""

    job_id: str
    """`12`, or `12_3` for task 3 of array 12."""
    state: str
    """SLURM's state: `PENDING`, `RUNNING`, `TIMEOUT`, ..."""
    reason: str
    """Why it waits, or how it ended; `None` without a reason."""
    token: str
    """Submission token; empty for jobs of others."""

    @property
    def phase(self) -> str:
        """`queued`, `running` or `gone`."""
        return "queued" if self.state in QUEUED else "running" if self.state in RUNNING else "gone"

    def __str__(self) -> str:
        state = self.state.lower().replace("_", " ")
        return state if self.reason in ("", "None", "(null)") else f"{state}: {self.reason}"


class UnreachableError(Exception):
    """SLURM did not answer, or refused, with its message. `silent`: it timed out, and asking again would take as
    long."""

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


def listed_jobs(owners: Sequence[int]) -> list[Job]:
    """Jobs of these users (by uid) that SLURM remembers: all that have not ended, and the rest for some minutes. Raises
    UnreachableError."""
    users = ",".join(str(owner) for owner in sorted(set(owners)))
    text = ask("squeue", "--noheader", "--array", "--states=all", f"--user={users}", "--format=%i|%T|%r|%k")
    jobs = []
    for line in text.splitlines():
        job_id, state, reason, comment = line.split("|", 3)
        token = comment.removeprefix(MARK) if comment.startswith(MARK) else ""
        _, _, task = job_id.partition("_")
        # The job that continues one run of an array already has its task in the token.
        jobs.append(Job(job_id, state, reason, f"{token}_{task}" if token and task else token))
    return jobs


def accounted(job_ids: Sequence[str]) -> Mapping[str, str]:
    """End of jobs that the controller forgot, by job id, from sacct; empty without accounting."""
    if not job_ids or shutil.which("sacct") is None:
        return {}
    try:
        text = ask("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={','.join(job_ids)}",
                   "--format=JobID,State,ExitCode")  # fmt: skip
    except UnreachableError:
        return {}
    rows = [line.split("|") for line in text.splitlines()]
    return {row[0]: ended_as(row[1], row[2]) for row in rows if len(row) == 3}


def ended_as(state: str, code: str) -> str:
    """End of a job from sacct's state and exit code, such as `CANCELLED by 1000` and `0:0`."""
    text = state.lower().replace("_", " ")
    by = re.fullmatch(r"(.* by )(\d+)", text)
    if by:
        with contextlib.suppress(KeyError):  # an unknown uid stays a number
            text = by[1] + pwd.getpwuid(int(by[2])).pw_name
    exit_code, _, signal = code.partition(":")
    details = [f"exit code {exit_code}"] if exit_code not in ("", "0") else []
    details += [f"signal {signal}"] if signal not in ("", "0") else []
    return f"{text} ({', '.join(details)})" if details else text


def ask(*command: str, timeout: float = TIMEOUT) -> str:
    """Output of a SLURM command. Raises UnreachableError if it is not installed, fails, or times out."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError:
        raise UnreachableError(f"{command[0]} is not installed on this machine") from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{command[0]} did not answer within {timeout:.0f} s", silent=True) from None
    if answer.returncode:
        raise UnreachableError(answer.stderr.strip() or f"{command[0]} ended with exit code {answer.returncode}")
    return answer.stdout
