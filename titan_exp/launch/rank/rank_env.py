"""Rank environment: rank, world size and launcher of this process, and the variables that hold them."""

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

import titan_exp
from titan_exp.config.devices import device_type, process_threads, visible_gpus
from titan_exp.config.groups.run import ClusterConfig
from titan_exp.launch.rank.rank_status import FALLBACK_FOLDER
from titan_exp.tracking.run_folder.files import FileLock, redirect_temporary_files
from titan_exp.tracking.run_folder.run_folder import World

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
"""Environment variables in which torchrun gives a rank its identity; container images set some of them, too."""
OURS = re.compile(r"TITAN_EXP_(ATTEMPT|GROUP|HOSTS|IMPORT_PATH|LAUNCHER|RENDEZVOUS|SPARE|TOKEN|VISIBLE_GPUS|WORLD)")
"""Environment variables in which a launch gives its ranks their identity."""


def outer_launch() -> dict[str, None]:
    """Environment changes that unset another launch's variables for its own ranks (torchrun's, or those of a run from
    which this command was typed)."""
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
    """Job id, equal on all ranks and unique per job. It is read for ranks started by hand or by a scheduler that counts
    restarts; otherwise the attempt has the id that its submission recorded."""
    hosts: tuple[str, ...] = ()
    """Names of all machines of the run."""
    restarts: int | None = None
    """Number of restarts of the job by the scheduler; None if not counted."""
    token: str | None = None
    """Submission token, by default from the environment; None for ranks started by hand."""
    gang: bool = False
    """True if the scheduler may kill all ranks after one rank's nonzero exit code."""
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


def waiting_threads() -> dict[str, str]:
    """Variables by which OpenMP's idle threads spin for a moment, then sleep; empty where the user has set one.

    Spinning until the next loop, as by default, starves other processes: beside two busy ones on two cores, training
    was three times slower. Sleeping at once makes a small step a quarter slower on an idle machine.
    """
    policy = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
    return {} if policy.keys() & os.environ.keys() else policy


def rank_environment(
    cluster: ClusterConfig, world_size: int, attempt: int, rendezvous_folder: Path, *, world: World | None = None
) -> dict[str, str | None]:
    """Changes to the launcher's environment for the ranks (of one `world` if there are several); None unsets a
    variable.

    `rendezvous_folder` is a new folder on a local disk; unlike a port, a file in it cannot be taken by another job.
    """
    return {
        **outer_launch(),
        "OMP_NUM_THREADS": str(process_threads(cluster, world_size)),
        **waiting_threads(),
        "GLOO_SOCKET_IFNAME": loopback(),
        "TITAN_EXP_RENDEZVOUS": str(rendezvous_folder / "meet"),
        ATTEMPT: str(attempt),
        LAUNCHER: str(os.getpid()),
        FALLBACK_FOLDER: str(rendezvous_folder),
        **redirect_temporary_files(rendezvous_folder),
        VISIBLE_GPUS: "" if device_type(cluster) == "cpu" else _gpus_of(world, world_size),
        "PYTHONPATH": os.pathsep.join(_python_path()),
        # The current folder comes last, as for the launcher: its `random.py` must not shadow the standard library.
        "PYTHONSAFEPATH": "1",
        IMPORT_PATH: os.pathsep.join(os.path.abspath(entry) for entry in [*sys.path, os.getcwd()]),
        # This dumps the stack on a crash in native code.
        "PYTHONFAULTHANDLER": "1",
        **({} if world is None else world.to_environment()),
    }


@contextlib.contextmanager
def environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables of this process for the block; None unsets one."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _gpus_of(world: World | None, world_size: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of the ranks: the launcher's value, divided among worlds if there are several."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    if world is None:
        return gpus
    count = visible_gpus()
    shown = list(map(str, range(count))) if gpus is None else gpus.split(",")[:count]
    return ",".join(gpu.strip() for gpu in shown[world.number * world_size :][:world_size])


def _python_path() -> list[str]:
    """PYTHONPATH, extended by the parent folder of titan_exp unless titan_exp is installed."""
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    ours = Path(titan_exp.__file__).resolve().parents[1]
    return inherited if ours.name in ("site-packages", "dist-packages") else [*inherited, str(ours)]


def loopback() -> str:
    """Name of the loopback interface, so that ranks connect without a network."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return "lo"
