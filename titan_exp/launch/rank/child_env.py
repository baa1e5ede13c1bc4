"""Environment of local rank processes, set before they start because libraries read it at import."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

import titan_exp
from titan_exp.config.groups.run import ClusterConfig
from titan_exp.config.machine.devices import device_type, process_threads, visible_gpus
from titan_exp.launch.rank.rank_env import ATTEMPT, IMPORT_PATH, LAUNCHER, VISIBLE_GPUS, outer_launch
from titan_exp.launch.rank.rank_status import FALLBACK_FOLDER
from titan_exp.tracking.run_folder.attempts import World
from titan_exp.tracking.run_folder.files import redirect_temporary_files


def rank_environment(
    cluster: ClusterConfig, world_size: int, attempt: int, rendezvous_folder: Path, *, world: World | None = None
) -> dict[str, str | None]:
    """Changes to the launcher's environment for the ranks, of one `world` if there are several; None unsets a variable.

    `rendezvous_folder` is a new folder on a local disk; unlike a port, a file in it cannot be taken by another job.
    """
    return {
        **outer_launch(),
        "OMP_NUM_THREADS": str(process_threads(cluster, world_size)),
        # Spinning threads starve other processes: beside one busy process on two cores, CPU training was four times
        # slower; alone there was no difference.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "GLOO_SOCKET_IFNAME": _loopback(),
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
        # Dump the stack on a crash in native code.
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
    """CUDA_VISIBLE_DEVICES of the ranks: the launcher's, of which each of several worlds has its own part."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    if world is None:
        return gpus
    count = visible_gpus()
    shown = list(map(str, range(count))) if gpus is None else gpus.split(",")[:count]
    return ",".join(gpu.strip() for gpu in shown[world.number * world_size :][:world_size])


def _python_path() -> list[str]:
    """PYTHONPATH, extended by the parent folder of titan_exp unless that is installed."""
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    ours = Path(titan_exp.__file__).resolve().parents[1]
    return inherited if ours.name in ("site-packages", "dist-packages") else [*inherited, str(ours)]


def _loopback() -> str:
    """Name of the loopback interface, so that ranks connect without a network."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return "lo"
