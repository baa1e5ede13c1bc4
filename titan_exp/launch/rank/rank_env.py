"""Which rank this process is, and who started it: submitit, SLURM, torchrun, or nobody."""

import os
import socket
import sys
import time
from dataclasses import dataclass

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.launch.slurm.rendezvous import SlurmTask, join_rendezvous, publish_rendezvous
from titan_exp.launch.state.close_attempt import close_dead_attempts
from titan_exp.launch.state.run_lock import acquire_run
from titan_exp.tracking.run_folder.file_lock import FileLock
from titan_exp.tracking.run_folder.run_folder import RunFolder

ATTEMPT = "TITAN_EXP_ATTEMPT"
"""Environment variable: number of the start that the launcher wrote down."""
LAUNCHER = "TITAN_EXP_LAUNCHER"
"""Environment variable: process number of the launcher."""
VISIBLE_GPUS = "TITAN_EXP_VISIBLE_GPUS"
"""Environment variable: what CUDA_VISIBLE_DEVICES was for the launcher, which submitit overwrites; unset if unset."""
IMPORT_PATH = "TITAN_EXP_IMPORT_PATH"
"""Environment variable: where the launcher finds packages; the ranks look there too, after their own places."""
ATTEMPT_TIMEOUT = 60.0
"""Seconds that other ranks wait for rank 0 to write the start down, where there is no launcher to do it."""


@dataclass(frozen=True)
class RankInfo:
    """The place of this process in the job."""

    rank: int
    """Number in the job."""
    world_size: int
    """Processes in the job."""
    local_rank: int
    """Number on this machine."""
    attempt: int
    """Number of the start."""
    launcher: int | None
    """Process number of the launcher; None where torchrun or a user started this process."""
    controller: int | None
    """Process number of submitit's controller."""
    claim: FileLock | None = None
    """The folder's lock, where this process had to claim it because there is no launcher."""
    gang: bool = False
    """Whether srun holds the ranks, which may kill all of them when one ends with another code than 0."""

    def announce(self) -> None:
        """Set the environment variables by which torch and the trainer know their place."""
        os.environ["RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = str(self.world_size)
        os.environ["LOCAL_RANK"] = str(self.local_rank)


def submitit_rank() -> RankInfo:
    """The seat that the launcher prepared through submitit. Gives CUDA_VISIBLE_DEVICES its value back, and the
    launcher's places to find packages."""
    extend_import_path()
    gpus = os.environ.get(VISIBLE_GPUS)
    if gpus is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    return RankInfo(
        rank=int(os.environ["SUBMITIT_LOCAL_GLOBALID"]),
        world_size=int(os.environ["SUBMITIT_LOCAL_NTASKS"]),
        local_rank=int(os.environ["SUBMITIT_LOCAL_LOCALID"]),
        attempt=int(os.environ[ATTEMPT]),
        launcher=int(os.environ[LAUNCHER]),
        controller=int(os.environ["SUBMITIT_LOCAL_JOB_ID"]),
    )


def extend_import_path() -> None:
    """Let Python find packages where the launcher found them, after this process's own places."""
    places = os.environ.get(IMPORT_PATH, "").split(os.pathsep)
    sys.path += [task for task in dict.fromkeys(places) if task and task not in sys.path]


def srun_rank(folder: RunFolder, task: SlurmTask) -> RankInfo:
    """The seat in a step of a SLURM job, whether our batch script started it or a user.

    Rank 0 claims the folder and writes the start down; the others wait for that.

    Raises:
        UserError: the folder is no run, somebody else runs it, or the number of processes is not its layout's.
    """
    extend_import_path()
    _require_layout(folder, task.world_size, "srun --ntasks {} python -m titan_exp.launch.rank.main")
    claim = None
    if task.rank == 0:
        claim = acquire_run(folder, "rank 0", print)
        number = _open_attempt(folder, task)
    else:
        number = _await_attempt(folder, task.job_id, task.restarts)
    if task.world_size > 1:
        join_rendezvous(folder, number)
    return RankInfo(task.rank, task.world_size, task.local_rank, number, None, None, claim, gang=True)


def _open_attempt(folder: RunFolder, task: SlurmTask) -> int:
    """The row of this start: the one written down at submission, or a new one where SLURM started the job again."""
    rows = folder.read_attempts()
    last = rows[-1] if rows else None
    same_job = last is not None and task.token is not None and last.token == task.token
    if last is not None and same_job and last.start is None and last.end is None:
        number = last.attempt
    else:
        if last is not None and same_job and last.end is None:
            reason = "ended by SLURM without a word (a node failed, or the job was queued again by hand)"
            folder.update_attempt(last.attempt, end=time.time(), reason=reason)
        close_dead_attempts(folder)
        number = folder.add_attempt(
            world_size=task.world_size,
            hosts=task.hosts,
            launched_by="hand" if task.token is None else "slurm",
            token=task.token,
            requeues=last.requeues + 1 if last is not None and same_job else 0,
        ).attempt
    if task.token is None:
        folder.clear_stop()  # our batch script has done it, and may have been told to stop since
    publish_rendezvous(folder, number, task)
    folder.update_attempt(number, job_id=task.job_id, hosts=task.hosts, restarts=task.restarts, start=time.time())
    return number


def torchrun_rank(folder: RunFolder) -> RankInfo:
    """The seat that torchrun's environment variables name, or that of the only process without them.

    Rank 0 claims the folder and writes the start down; the others wait for that.

    Raises:
        UserError: the folder is no run, somebody else runs it, or the number of processes is not its layout's.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    _require_layout(folder, size, "torchrun --nproc-per-node {} -m titan_exp.launch.rank.main")
    claim = None
    if rank == 0:
        claim = acquire_run(folder, "rank 0", print)
        close_dead_attempts(folder)
        folder.clear_stop()
        number = folder.add_attempt(
            world_size=size, hosts=[socket.gethostname()], job_id=_job_key(), launched_by="hand"
        ).attempt
        folder.update_attempt(number, start=time.time())
    else:
        number = _await_attempt(folder, _job_key())
    return RankInfo(rank, size, int(os.environ.get("LOCAL_RANK", "0")), number, None, None, claim)


def _job_key() -> str:
    """The same text on every rank of one job, and another one for the next job where the environment tells."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is not None:
        return f"torchrun-{run}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{os.environ.get('MASTER_PORT', '')}"
    return f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '0')}"


def _require_layout(folder: RunFolder, size: int, command: str) -> None:
    if not folder.config.exists():
        raise UserError(f"{folder.path} holds no config.yaml, so it is not a run. `titan-exp train` makes one.")
    expected = ResolvedLayout.of(load_experiment(folder.config)).world_size
    if size != expected:
        raise UserError(
            f"{folder.path} is laid out for {expected} process(es) and was started with {size}. "
            f"Start it with `{command.format(expected)} {folder.path}`."
        )


def _await_attempt(folder: RunFolder, job_id: str, restarts: int | None = None) -> int:
    deadline = time.monotonic() + ATTEMPT_TIMEOUT
    while time.monotonic() < deadline:
        rows = folder.read_attempts()
        row = rows[-1] if rows else None
        # A start of SLURM's has a name of its own, so that one which is over already is still the right one.
        over = row is not None and row.end is not None and restarts is None
        if row and row.start is not None and not over and (row.job_id, row.restarts) == (job_id, restarts):
            return row.attempt
        time.sleep(0.1)
    raise UserError(f"{folder.path}: rank 0 did not start within {ATTEMPT_TIMEOUT:.0f} s. Look at what it printed.")
