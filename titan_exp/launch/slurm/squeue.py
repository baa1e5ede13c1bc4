"""SLURM's answers: job states from squeue and sacct, exits of tasks in srun's log."""

import contextlib
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_exp.launch.slurm.script import MARK, START

TIMEOUT = 20.0  # timeout of SLURM commands in seconds; they block while the controller is down

ROW = "titan_exp|"  # first column of squeue's table, which identifies its rows
QUEUED = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")


CAUSES = {
    "configuration source": "this machine belongs to no cluster (it has no slurm.conf, and its network names none)",
    "Unable to contact slurm controller": "the controller of the cluster does not answer",
    "authentication": "munge, by which SLURM knows its users, does not answer on this machine",
}
"""Sentences by words in the output of a SLURM command that fails."""


@dataclass(frozen=True)
class Job:
    """Job or array task, as listed by squeue."""

    job_id: str  # `12`, or `12_3` for task 3 of array 12
    state: str  # SLURM's state: `PENDING`, `RUNNING`, `TIMEOUT`, ..
    reason: str  # pending reason, or how the job ended; the text `None` without a reason
    token: str  # submission token; empty for unrelated jobs

    @property
    def phase(self) -> str:
        """`queued`, `running` or `gone`."""
        return "queued" if self.state in QUEUED else "running" if self.state in RUNNING else "gone"

    def __str__(self) -> str:
        state = self.state.lower().replace("_", " ")
        return state if self.reason in ("", "None", "(null)") else f"{state}: {self.reason}"


class UnreachableError(Exception):
    """A SLURM command failed or timed out. `silent` is True if it timed out, as would a retry."""

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


def listed_jobs(owners: Sequence[int]) -> list[Job]:
    """Jobs of users (by uid) from squeue: active ones, and recently ended ones. Raises UnreachableError."""
    users = ",".join(str(owner) for owner in sorted(set(owners)))
    text = ask("squeue", "--array", "--states=all", f"--user={users}", f"--format={ROW}%i|%T|%r|%k")
    # Other lines are a site's notice, or the rest of a comment. Without the header nothing is known.
    header, *rows = [line for line in text.splitlines() if line.startswith(ROW)] or [""]
    if header.count("|") != 4 or any(row.count("|") < 4 for row in rows):
        raise UnreachableError(f"squeue printed no table of jobs: {text[:200]!r}")
    jobs = []
    for row in rows:
        job_id, state, reason, comment = row.removeprefix(ROW).split("|", 3)
        # A site's own text may precede the token.
        token = comment.rpartition(" ")[2].removeprefix(MARK) if MARK in comment else ""
        _, _, task = job_id.partition("_")
        # A chained job of an array task already has the task in its token.
        jobs.append(Job(job_id, state, reason, f"{token}_{task}" if token and task else token))
    return jobs


def accounted(job_ids: Sequence[str]) -> Mapping[str, str]:
    """Final state by job id from sacct, for jobs that squeue no longer lists; empty without accounting."""
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
    """Format sacct's state and exit code, such as `CANCELLED by 1000` and `0:0`."""
    text = state.lower().replace("_", " ")
    by = re.fullmatch(r"(.* by )(\d+)", text)
    if by:
        with contextlib.suppress(KeyError):  # an unknown uid is kept as a number
            text = by[1] + pwd.getpwuid(int(by[2])).pw_name
    exit_code, _, signal = code.partition(":")
    details = [f"exit code {exit_code}"] if exit_code not in ("", "0") else []
    details += [f"signal {signal}"] if signal not in ("", "0") else []
    return f"{text} ({', '.join(details)})" if details else text


def ask(*command: str, timeout: float = TIMEOUT) -> str:
    """Output of a SLURM command. Raises UnreachableError if it is not installed, fails, or times out."""
    # Without the variables that filter a user's own squeue, sacct and scancel.
    filters = ("SQUEUE_", "SACCT_", "SCANCEL_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(filters)}
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False, env=environment
        )
    except FileNotFoundError:
        raise UnreachableError(f"{command[0]} is not installed on this machine") from None
    except OSError as error:
        raise UnreachableError(f"cannot run {command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{command[0]} did not answer within {timeout:.0f} s", silent=True) from None
    if answer.returncode:
        raise UnreachableError(in_a_sentence(answer.stderr) or f"{command[0]} ended with exit code {answer.returncode}")
    return answer.stdout


def in_a_sentence(stderr: str) -> str:
    """Cause of a SLURM command's failure, from the lines that it printed; empty if it printed none."""
    for words, sentence in CAUSES.items():
        if words in stderr:
            return sentence
    head = r"^\s*\w+: (?:(?:error|fatal): )?(?:Batch job submission failed: )?"
    lines = [re.sub(head, "", line) for line in stderr.splitlines()]
    said = dict.fromkeys(text for line in lines if (text := " ".join(line.split()).rstrip(".")))
    return "; ".join([*said][:2])


_PARTITIONS = ("sinfo", "--noheader", "--format=%R|%l|%D|%G")
_ACCOUNTS = ("sacctmgr", "--noheader", "--parsable2", "show", "associations", "format=Account,Partition,QOS")
_REFUSALS = {
    r"invalid partition": ("another partition", _PARTITIONS),
    r"time limit": ("a shorter cluster.time_limit, or a partition that allows it", _PARTITIONS),
    r"node count|node configuration": ("a layout for fewer nodes or GPUs, or a partition that has them", _PARTITIONS),
    r"generic resource|\bgres\b": ("cluster.gpu_type=null, or a type that a partition has", _PARTITIONS),
    r"invalid account|invalid qos": ("an account and a QOS that you may use", _ACCOUNTS),
}
"""Remedy, and the command that lists alternatives, by words of sbatch."""
MOST = 12


def explain_refusal(stderr: str, asked: Sequence[str]) -> str:
    """Lines about a refused sbatch: the request, sbatch's own words, and the remedy if the cause is known."""
    said = [line.strip() for line in stderr.splitlines() if line.strip()]
    lines = [f"asked: {' '.join(asked)}", *said]
    text = " ".join(said).lower()
    remedy = next((found for words, found in _REFUSALS.items() if re.search(words, text)), None)
    if remedy is not None:
        listed = _alternatives(remedy[1])
        more = [f"  and {len(listed) - MOST} more"] if len(listed) > MOST else []
        lines += [f"Type {remedy[0]}:", *(f"  {line}" for line in listed[:MOST]), *more]
    return "\n".join(lines)


def _alternatives(command: Sequence[str]) -> list[str]:
    """Keys with values that this user may type; only the command if it does not answer."""
    user = [f"user={pwd.getpwuid(os.geteuid()).pw_name}"] if command == _ACCOUNTS else []
    try:
        rows = [line.split("|") for line in ask(*command, *user).splitlines()]
    except (UnreachableError, KeyError) as error:
        return [f"to see them, type {' '.join(command)} ({error})"]
    if command == _PARTITIONS:
        return [f"cluster.partition={row[0]}  time limit {row[1]}, nodes {row[2]}, GRES {row[3]}" for row in rows]
    return [
        f"cluster.account={account}{partition and f' cluster.partition={partition}'}{qos and f' cluster.qos={qos}'}"
        for account, partition, many in rows
        for qos in many.split(",")
    ]


_TASKS = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.+)")
_ABORTED = "srun: Job step aborted"
_TERMINATING = re.compile(rf"{_ABORTED}|_step_signal: Terminating |\*\*\* (STEP|JOB) .*CANCELLED AT ")
_OUT_OF_MEMORY = re.compile(r"oom[-_ ]?kill|out[-_ ]of[-_ ]memory|exceeded (job |step )?memory limit", re.IGNORECASE)
_TERMINATED = "Terminated"


@dataclass(frozen=True)
class TaskExit:
    """Exit of a task other than with code 0."""

    rank: int
    message: str  # srun's words: `Killed`, `Out Of Memory`, `Exited with exit code 1`, ..
    first: bool  # True if reported before srun ended the step, so that srun cannot have killed the task


@dataclass(frozen=True)
class SrunLog:
    """Messages of srun and slurmstepd since the job's last start."""

    exits: tuple[TaskExit, ...]
    """Exits in srun's order, which is not always the real order. Tasks that srun's SIGTERM ended are left out."""
    out_of_memory: bool  # True if the kernel or SLURM killed a task because of its memory
    aborted: bool  # True if SLURM ended the step before any task exited


def parse_srun_log(text: str) -> SrunLog:
    """Parse a job's log."""
    text = text.rpartition(START)[2]
    aborted = _ABORTED in _TASKS.split(text, maxsplit=1)[0]
    return SrunLog(tuple(_task_exits(text)), _OUT_OF_MEMORY.search(text) is not None, aborted)


def _task_exits(text: str) -> Iterator[TaskExit]:
    first = True
    for line in text.splitlines():
        first = first and _TERMINATING.search(line) is None
        found = _TASKS.search(line)
        if found is not None and (message := found[2].strip()) != _TERMINATED:
            for part in found[1].split(","):  # ranks, such as `0,4-7`
                begin, _, end = part.partition("-")
                yield from (TaskExit(rank, message, first) for rank in range(int(begin), int(end or begin) + 1))
