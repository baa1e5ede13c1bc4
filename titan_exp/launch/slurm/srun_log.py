"""Exit messages of tasks in srun's log: ranks, their signal or exit code, and out-of-memory kills."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from titan_exp.launch.slurm.script import START

_TASKS = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.+)")
_ABORTED = "srun: Job step aborted"
_TERMINATING = re.compile(rf"{_ABORTED}|_step_signal: Terminating |\*\*\* (STEP|JOB) .*CANCELLED AT ")
_OUT_OF_MEMORY = re.compile(r"oom[-_ ]?kill|out[-_ ]of[-_ ]memory|exceeded (job |step )?memory limit", re.IGNORECASE)
_TERMINATED = "Terminated"


@dataclass(frozen=True)
class TaskExit:
    """Exit of a task other than with code 0."""

    rank: int
    message: str
    """srun's words: `Killed`, `Out Of Memory`, `Exited with exit code 1`, ..."""
    first: bool
    """True if reported before srun ended the step, so that srun cannot have killed the task."""


@dataclass(frozen=True)
class SrunLog:
    """Messages of srun and slurmstepd since the job's last start."""

    exits: tuple[TaskExit, ...]
    """In srun's order, which is not always that of the exits. Tasks that SIGTERM ended, which srun sends, are left
    out."""
    out_of_memory: bool
    """True if the kernel or SLURM killed a task for its memory."""
    aborted: bool
    """True if SLURM ended the step before any task exited."""


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
            for rank in _expand(found[1]):
                yield TaskExit(rank, message, first)


def _expand(ranks: str) -> Iterator[int]:
    """Ranks of a list such as `0,4-7`."""
    for part in ranks.split(","):
        begin, _, end = part.partition("-")
        yield from range(int(begin), int(end or begin) + 1)
