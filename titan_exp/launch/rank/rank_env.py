"""Rank environment: rank, world size and launcher of this process."""

import os
import re
import socket
import sys
from dataclasses import dataclass

from titan_exp.tracking.run_folder.files import FileLock

ATTEMPT = "TITAN_EXP_ATTEMPT"
"""Environment variable: attempt number recorded by the launcher."""
LAUNCHER = "TITAN_EXP_LAUNCHER"
"""Environment variable: pid of the launcher."""
VISIBLE_GPUS = "TITAN_EXP_VISIBLE_GPUS"
"""Environment variable: the launcher's CUDA_VISIBLE_DEVICES, overwritten by submitit; unset if that is unset."""
IMPORT_PATH = "TITAN_EXP_IMPORT_PATH"
"""Environment variable: the launcher's sys.path; ranks search it after their own."""
TOKEN = "TITAN_EXP_TOKEN"
"""Environment variable: identifies the submission. Ranks started by hand have none."""
GROUP = "TITAN_EXP_GROUP"
"""Environment variable: number of the world to which a job belongs; unset if the run has one."""
HOSTS = "TITAN_EXP_HOSTS"
"""Environment variable: names of a run's hosts, separated by commas, for ranks that a host agent starts."""
TORCHRUN = re.compile(r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+)")
"""Environment variables by which torchrun tells a rank who it is; images of containers set some of them, too."""
OURS = re.compile(r"TITAN_EXP_(ATTEMPT|GROUP|HOSTS|IMPORT_PATH|LAUNCHER|RENDEZVOUS|SPARE|TOKEN|VISIBLE_GPUS|WORLD)")
"""Environment variables by which a launch tells its ranks who they are."""


def outer_launch() -> dict[str, None]:
    """Environment changes that unset what another launch (torchrun, or a run from which this command was typed) tells
    its own ranks."""
    return {name: None for name in os.environ if TORCHRUN.fullmatch(name) or OURS.fullmatch(name)}


def forget_torchrun() -> None:
    """Unset torchrun's variables in a rank that another launcher started."""
    for name in filter(TORCHRUN.fullmatch, list(os.environ)):
        del os.environ[name]


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process and its job."""

    rank: int
    world_size: int
    local_rank: int
    """Rank on this machine; 0 if only one GPU is visible."""
    job_id: str = ""
    """Job id, equal on all ranks and unique per job, of ranks started by hand or of a scheduler that counts restarts;
    else the attempt has the id that its submission recorded, and this one is not read."""
    hosts: tuple[str, ...] = ()
    """Names of all machines of the run."""
    restarts: int | None = None
    """Number of restarts of the job by the scheduler; None if not counted."""
    token: str | None = None
    """Submission token, by default that of the environment; None for ranks started by hand."""
    gang: bool = False
    """True if the scheduler may kill all ranks after a nonzero exit code of one."""
    by_hand: str = "torchrun --nproc-per-node {}"
    """Command template that starts the ranks by hand, for error messages."""
    launcher: int | None = None
    """Pid of the launcher on this machine; None without one. `controller` is the pid of submitit's controller."""
    controller: int | None = None
    attempt: int | None = None
    """Attempt number; None until the rank has joined the attempt."""
    claim: FileLock | None = None
    """Run lock, held by rank 0 if there is no launcher."""

    def set_torch_env(self) -> None:
        """Set RANK, WORLD_SIZE and LOCAL_RANK, as torchrun does."""
        os.environ["RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = str(self.world_size)
        os.environ["LOCAL_RANK"] = str(self.local_rank)


def torchrun_rank() -> RankInfo:
    """Rank from torchrun's environment; rank 0 of 1 without torchrun."""
    env = os.environ
    port = env.get("MASTER_PORT", "")
    job_id = f"{env.get('MASTER_ADDR', 'localhost')}:{port or '0'}"
    if "TORCHELASTIC_RUN_ID" in env:
        job_id = f"torchrun-{env['TORCHELASTIC_RUN_ID']}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}-{port}"
    return RankInfo(
        int(env.get("RANK", "0")),
        int(env.get("WORLD_SIZE", "1")),
        int(env.get("LOCAL_RANK", "0")),
        job_id,
        (socket.gethostname(),),
    )


def extend_import_path() -> None:
    """Append the launcher's sys.path to this process's."""
    folders = os.environ.get(IMPORT_PATH, "").split(os.pathsep)
    sys.path += [folder for folder in dict.fromkeys(folders) if folder and folder not in sys.path]
