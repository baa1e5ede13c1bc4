"""Which rank this process is, and who started it: submitit, torchrun, or nobody."""

import os
import socket
import sys
import time
from dataclasses import dataclass

from titan_exp.config.convert import load_experiment
from titan_exp.config.errors import UserError
from titan_exp.config.layout import world_size
from titan_exp.launch.ending import close_dead_attempts
from titan_exp.launch.holding import hold
from titan_exp.tracking.lock import FileLock
from titan_exp.tracking.run_folder import RunFolder

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
class Seat:
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

    def announce(self) -> None:
        """Set the environment variables by which torch and the trainer know their place."""
        os.environ["RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = str(self.world_size)
        os.environ["LOCAL_RANK"] = str(self.local_rank)


def submitted_seat() -> Seat:
    """The seat that the launcher prepared through submitit. Gives CUDA_VISIBLE_DEVICES its value back, and the
    launcher's places to find packages."""
    places = os.environ.get(IMPORT_PATH, "").split(os.pathsep)
    sys.path += [place for place in dict.fromkeys(places) if place and place not in sys.path]
    gpus = os.environ.get(VISIBLE_GPUS)
    if gpus is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    return Seat(
        rank=int(os.environ["SUBMITIT_LOCAL_GLOBALID"]),
        world_size=int(os.environ["SUBMITIT_LOCAL_NTASKS"]),
        local_rank=int(os.environ["SUBMITIT_LOCAL_LOCALID"]),
        attempt=int(os.environ[ATTEMPT]),
        launcher=int(os.environ[LAUNCHER]),
        controller=int(os.environ["SUBMITIT_LOCAL_JOB_ID"]),
    )


def plain_seat(folder: RunFolder) -> Seat:
    """The seat that torchrun's environment variables name, or that of the only process without them.

    Rank 0 claims the folder and writes the start down; the others wait for that.

    Raises:
        UserError: the folder is no run, somebody else runs it, or the number of processes is not its layout's.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not folder.config.exists():
        raise UserError(f"{folder.path} holds no config.yaml, so it is not a run. `titan-exp train` makes one.")
    expected = world_size(load_experiment(folder.config))
    if size != expected:
        raise UserError(
            f"{folder.path} is laid out for {expected} process(es) and was started with {size}. "
            f"Start it with `torchrun --nproc-per-node {expected} -m titan_exp.launch.rank {folder.path}`."
        )
    claim = None
    if rank == 0:
        claim = hold(folder, "rank 0", print)
        close_dead_attempts(folder)
        folder.clear_stop()
        number = folder.add_attempt(world_size=size, hosts=[socket.gethostname()], job_id=_job_key()).attempt
        folder.update_attempt(number, start=time.time())
    else:
        number = _await_attempt(folder)
    return Seat(rank, size, int(os.environ.get("LOCAL_RANK", "0")), number, None, None, claim)


def _job_key() -> str:
    """The same text on every rank of one job, and another one for the next job where the environment tells."""
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    if run is not None:
        return f"torchrun-{run}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{os.environ.get('MASTER_PORT', '')}"
    return f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '0')}"


def _await_attempt(folder: RunFolder) -> int:
    deadline = time.monotonic() + ATTEMPT_TIMEOUT
    while time.monotonic() < deadline:
        rows = folder.read_attempts()
        if rows and rows[-1].end is None and rows[-1].job_id == _job_key():
            return rows[-1].attempt
        time.sleep(0.1)
    raise UserError(f"{folder.path}: rank 0 did not start within {ATTEMPT_TIMEOUT:.0f} s. Look at what it printed.")
