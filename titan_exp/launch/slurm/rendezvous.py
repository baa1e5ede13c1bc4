"""The place of a rank in a SLURM job, and how the ranks of a step find each other."""

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from titan_exp.config.errors.user_error import UserError
from titan_exp.tracking.run_folder.run_folder import RunFolder, write_atomically

TOKEN = "TITAN_EXP_TOKEN"
"""Environment variable: by which the job is found; set by our batch script, so ranks started by hand have none."""
FIRST_PORT, LAST_PORT = 20000, 32000
"""Where the ranks meet: below the ports that systems give to whoever connects somewhere."""
MEETING_LIMIT = 60.0
"""Seconds that other ranks wait to read where to meet: a network disk may show a new file late."""


@dataclass(frozen=True)
class SlurmTask:
    """What SLURM's environment variables say of this process."""

    rank: int
    """Number in the step."""
    world_size: int
    """Processes of the step."""
    local_rank: int
    """Number on this node, or of the only GPU that SLURM shows to the process."""
    hosts: tuple[str, ...]
    """Nodes of the job."""
    job_id: str
    """Number of the job, or of the array and its task; started by hand, with the step's number after a dot."""
    restarts: int
    """How often SLURM had started the job before."""
    token: str | None
    """By which our batch script is found; None where a user started the step."""


def slurm_task() -> SlurmTask | None:
    """The place of this process; None where srun did not start it, or torchrun did below srun."""
    env = os.environ
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env or "RANK" in env:
        return None
    from submitit.slurm.slurm import SlurmJobEnvironment

    token = env.get(TOKEN)
    return SlurmTask(
        rank=int(env["SLURM_PROCID"]),
        world_size=int(env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"]),
        local_rank=_local_rank(),
        hosts=tuple(SlurmJobEnvironment().hostnames),
        job_id=job_name() if token is not None else f"{job_name()}.{env['SLURM_STEP_ID']}",
        restarts=int(env.get("SLURM_RESTART_COUNT", "0")),
        token=token,
    )


def job_name() -> str:
    """The number of the job that this process is in. A task of an array is named by both numbers: alone, one task's
    own number is that of the whole array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def publish_rendezvous(folder: RunFolder, attempt: int, task: SlurmTask) -> None:
    """Rank 0 says where it will listen, before the start is written down. On one node nothing leaves it."""
    address = "127.0.0.1" if os.environ.get("SLURM_STEP_NUM_NODES") == "1" else socket.gethostname()
    logs = folder.attempt_logs(attempt)
    logs.mkdir(parents=True, exist_ok=True)
    write_atomically(logs / "meeting", f"{address} {_free_port(int(os.environ['SLURM_JOB_ID']))}\n", durable=False)
    for rank in range(task.world_size):
        link = logs / f"rank-{rank:05d}.log"
        if task.token is not None and not link.is_symlink():
            link.symlink_to(Path("..") / f"slurm-{task.job_id}-{task.restarts}-rank-{rank:05d}.log")


def join_rendezvous(folder: RunFolder, attempt: int) -> None:
    """Set the environment variables by which torch finds rank 0.

    Raises:
        UserError: rank 0 has said nothing.
    """
    path, deadline = folder.attempt_logs(attempt) / "meeting", time.monotonic() + MEETING_LIMIT
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(f"{path} did not appear within {MEETING_LIMIT:.0f} s: is this folder shared by all nodes?")
        time.sleep(0.1)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = path.read_text(encoding="utf-8").split()
    if os.environ["MASTER_ADDR"] == "127.0.0.1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _local_rank() -> int:
    number = int(os.environ.get("SLURM_LOCALID", "0"))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # A site that binds each task to its GPU shows it that one alone, which is then number 0.
    return 0 if shown and "," not in shown else number


def _free_port(job: int) -> int:
    """A port that nobody listens on, begun to look for at one of the job's own."""
    count = LAST_PORT - FIRST_PORT
    for offset in range(count):
        port = FIRST_PORT + (job * 7 + offset) % count
        with socket.socket() as candidate:
            try:
                candidate.bind(("", port))
            except OSError:
                continue
        return port
    raise UserError(f"No free port between {FIRST_PORT} and {LAST_PORT} on {socket.gethostname()}.")
