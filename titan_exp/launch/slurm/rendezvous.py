"""Rank and rendezvous inside a SLURM job step."""

import os
import socket
from pathlib import Path

from titan_exp.launch.rank.rank_env import TOKEN, RankInfo
from titan_exp.launch.rank.rendezvous import LOOPBACK, publish_address
from titan_exp.tracking.run_folder.run_folder import RunFolder


def srun_rank() -> RankInfo | None:
    """Rank from srun's environment; None without srun, or under torchrun by hand.

    In a submitted job srun counts, whoever else has set RANK: a hook of the container runtime, or the shell of the
    submission.
    """
    env = os.environ
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env or (TOKEN not in env and "RANK" in env):
        return None
    from submitit.slurm.slurm import SlurmJobEnvironment

    token = env.get(TOKEN)
    return RankInfo(
        rank=int(env["SLURM_PROCID"]),
        world_size=int(env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"]),
        local_rank=_local_rank(),
        job_id=slurm_job_id() if token is not None else f"{slurm_job_id()}.{env['SLURM_STEP_ID']}",
        hosts=tuple(SlurmJobEnvironment().hostnames),
        restarts=int(env.get("SLURM_RESTART_COUNT", "0")),
        token=token,
        gang=True,
        by_hand="srun --ntasks {} python",
    )


def slurm_job_id() -> str:
    """Job id of this process; `ARRAY_TASK` for an array task, whose SLURM_JOB_ID may be the array's."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ["SLURM_JOB_ID"]


def publish_rendezvous(folder: RunFolder, rank: RankInfo, host: str | None = None) -> None:
    """Write rank 0's address and links to the rank logs into the attempt's log folder, or that of a world.

    Without `host` the address is the loopback interface on one node, else the node's name.
    """
    assert rank.attempt is not None
    address = host or (LOOPBACK if os.environ.get("SLURM_STEP_NUM_NODES") == "1" else socket.gethostname())
    publish_address(folder, rank, address, int(os.environ["SLURM_JOB_ID"]))
    logs = folder.attempt_logs(rank.attempt)
    for number in range(rank.world_size):
        link = logs / f"rank-{number:05d}.log"
        if rank.token is not None and not link.is_symlink():
            up = Path(*[".."] * len(logs.relative_to(folder.logs).parts))
            link.symlink_to(up / f"slurm-{rank.job_id}-{rank.restarts}-rank-{number:05d}.log")


def _local_rank() -> int:
    number = int(os.environ.get("SLURM_LOCALID", "0"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # With GPU binding per task, a task sees one GPU, as device 0.
    return 0 if visible and "," not in visible else number
