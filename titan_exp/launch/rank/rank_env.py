"""Rank environment: rank, world size and launcher of this process; its status, and the watchdog over its parents."""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

import titan_exp
from titan_exp.config.devices import device_type, process_threads, visible_gpus
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.run import ClusterConfig
from titan_exp.config.secrets import concealed
from titan_exp.tracking.run_folder.files import FileLock, redirect_temporary_files
from titan_exp.tracking.run_folder.run_folder import DONE, STOPPED, RunFolder, World, read_json, write_atomically

FALLBACK_FOLDER = "TITAN_EXP_SPARE"
"""Environment variable: folder on another disk for the record, if the run folder is missing or its disk is full."""
FAILURE_MARK = "titan_exp: this rank failed"
"""Line in a rank's log before its traceback, which the launcher shows separately."""
HANG, FOLDER_LOST = "Hung", "FolderLost"  # error types that concern the run rather than one rank


@dataclass(frozen=True)
class RankError:
    """Error that ended a rank."""

    type: str  # class name of the exception
    message: str
    traceback: str
    user: bool  # True for a UserError and an Outcome, whose message needs no traceback

    def reason(self, rank: int) -> str:
        """First line of the message, with the rank and the type unless it concerns the run."""
        line = self.message.strip().partition("\n")[0]
        return line if self.type in (HANG, FOLDER_LOST) else f"rank {rank}: {self.type}: {line}".removesuffix(": ")


@dataclass(frozen=True)
class RankRecord:
    """Status record of one rank. Times are Unix times."""

    rank: int
    pid: int
    host: str
    start: float
    end: float | None = None  # None while running
    exit: int | None = None  # exit code; None while running
    error: RankError | None = None
    signal: str | None = None
    """First signal that asked this rank to stop. srun, which sends SIGTERM first, killed no rank without a signal."""

    @property
    def failed(self) -> bool:
        """True if the rank ended with an exit code other than DONE and STOPPED."""
        return self.exit not in (None, DONE, STOPPED)


def write_record(folder: RunFolder, attempt: int, record: RankRecord) -> None:
    """Write a rank's record beside the attempt's logs; if that fails, into the fallback folder."""
    name = f"rank-{record.rank:05d}.json"
    text = concealed(json.dumps(asdict(record), indent=2)) + "\n"
    try:
        write_atomically(folder.make_attempt_logs(attempt) / name, text, durable=False)
    except OSError:
        fallback = os.environ.get(FALLBACK_FOLDER)
        if fallback is None:
            raise
        write_atomically(Path(fallback) / name, text, durable=False)


def read_record(folder: RunFolder, attempt: int, rank: int, fallback: Path | None = None) -> RankRecord | None:
    """Read a rank's record, trying the fallback folder first; None before its start, or if the record is damaged."""
    for logs in filter(None, (fallback, folder.attempt_logs(attempt))):
        with contextlib.suppress(UserError):  # damaged, which counts as if the rank had not started
            if (record := read_json(logs / f"rank-{rank:05d}.json", RankRecord)) is not None:
                return record
    return None


POLL_INTERVAL = 0.25
GRACE = 3.0  # seconds that an orphaned rank has to fail by itself after a peer failed
SAVE_LIMIT = 600.0  # seconds that an orphaned rank has to save, since no user can press Ctrl-C twice


class ParentWatchdog(threading.Thread):
    """Watchdog thread over the rank's controller and launcher, running until the process exits. `give_up(reason)` exits
    this process, and `on_orphaned()` may do so once the launcher has exited."""

    def __init__(
        self, folder: RunFolder, rank: "RankInfo", give_up: Callable[[str], None], on_orphaned: Callable[[], None]
    ) -> None:
        super().__init__(name="titan_exp parent watchdog", daemon=True)
        self.orphaned = False  # True if the launcher has exited
        self._folder, self._rank, self._controller = folder, rank, rank.controller
        self._give_up, self._on_orphaned = give_up, on_orphaned

    def run(self) -> None:
        """Poll the parents. When a parent exits, even as a zombie, its child's parent pid changes."""
        while not self._launcher_is_gone():
            if os.getppid() != self._controller:
                self._give_up("the parent process of the ranks (submitit's controller) is gone")
            time.sleep(POLL_INTERVAL)
        self.orphaned = True
        with contextlib.suppress(OSError):  # on a full disk nothing can be saved; the limit below ends the rank
            self._folder.request_stop("the launcher is gone")
        self._on_orphaned()
        # The rank saves. It exits if a peer failed, since its collectives would block forever.
        began, peer_died = time.monotonic(), None
        while True:
            now = time.monotonic()
            if os.getppid() != self._controller:
                self._give_up("the launcher and the parent process of the ranks are gone")
            if peer_died is None and self._has_peer_died():
                peer_died = now
            if peer_died is not None and now - peer_died > GRACE:
                self._give_up("the launcher is gone and another rank died")
            if now - began > SAVE_LIMIT:
                self._give_up(f"the launcher is gone and saving took longer than {SAVE_LIMIT:.0f} s")
            time.sleep(POLL_INTERVAL)

    def _launcher_is_gone(self) -> bool:
        try:
            return psutil.Process(self._controller).ppid() != self._rank.launcher
        except psutil.Error:
            return False  # the controller has exited; checked next

    def _has_peer_died(self) -> bool:
        try:
            siblings = psutil.Process(self._controller).children()
            alive = {sibling.pid for sibling in siblings if sibling.status() != psutil.STATUS_ZOMBIE}
        except psutil.Error:
            return False  # processes have changed; retried at the next poll
        assert self._rank.attempt is not None
        for rank in set(range(self._rank.world_size)) - {self._rank.rank}:
            record = read_record(self._folder, self._rank.attempt, rank)
            if record is not None and (record.failed or (record.exit is None and record.pid not in alive)):
                return True
        return False


ATTEMPT = "TITAN_EXP_ATTEMPT"  # environment variable: attempt number recorded by the launcher
LAUNCHER = "TITAN_EXP_LAUNCHER"  # environment variable: pid of the launcher
VISIBLE_GPUS = "TITAN_EXP_VISIBLE_GPUS"
"""Environment variable: the launcher's CUDA_VISIBLE_DEVICES, overwritten by submitit; unset if that is unset."""
IMPORT_PATH = "TITAN_EXP_IMPORT_PATH"  # environment variable: the launcher's sys.path; ranks search it after their own
TOKEN = "TITAN_EXP_TOKEN"  # environment variable: identifies the submission. Ranks started by hand have none.
GROUP = "TITAN_EXP_GROUP"  # environment variable: number of the world to which a job belongs; unset if the run has one
HOSTS = "TITAN_EXP_HOSTS"
"""Environment variable: names of a run's hosts, separated by commas, for ranks that a host agent starts."""
TORCHRUN = re.compile(r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+)")
"""Environment variables in which torchrun gives a rank its identity; container images set some of them, too."""
OURS = re.compile(r"TITAN_EXP_(ATTEMPT|GROUP|HOSTS|IMPORT_PATH|LAUNCHER|RENDEZVOUS|SPARE|TOKEN|VISIBLE_GPUS|WORLD)")
"""Environment variables in which a launch gives its ranks their identity."""


def outer_launch() -> dict[str, None]:
    """Environment changes that unset what another launch, torchrun's or that of a run, has set for its own ranks."""
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
    local_rank: int  # rank on this machine; 0 if only one GPU is visible
    job_id: str = ""
    """Job id, equal on all ranks and unique per job. It is read for ranks started by hand or by a scheduler that counts
    restarts; otherwise the attempt has the id that its submission recorded."""
    hosts: tuple[str, ...] = ()  # names of all machines of the run
    restarts: int | None = None  # number of restarts of the job by the scheduler; None if not counted
    token: str | None = None  # submission token, by default from the environment; None for ranks started by hand
    gang: bool = False  # True if the scheduler may kill all ranks after one rank's nonzero exit code
    by_hand: str = "torchrun --nproc-per-node {}"  # command template that starts the ranks by hand, for error messages
    launcher: int | None = None
    """Pid of the launcher on this machine; None without one. `controller` is the pid of submitit's controller."""
    controller: int | None = None
    attempt: int | None = None  # attempt number; None until the rank has joined the attempt
    claim: FileLock | None = None  # run lock, held by rank 0 if there is no launcher

    def set_torch_env(self) -> None:
        """Set RANK, WORLD_SIZE and LOCAL_RANK, as torchrun does."""
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.world_size), "LOCAL_RANK": str(self.local_rank)}


def torchrun_rank() -> RankInfo:
    """Rank from torchrun's environment; rank 0 of 1 without torchrun."""
    env, port = os.environ, os.environ.get("MASTER_PORT", "")
    job_id = f"{env.get('MASTER_ADDR', 'localhost')}:{port or '0'}"
    if "TORCHELASTIC_RUN_ID" in env:
        job_id = f"torchrun-{env['TORCHELASTIC_RUN_ID']}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}-{port}"
    rank, size, local = env.get("RANK", "0"), env.get("WORLD_SIZE", "1"), env.get("LOCAL_RANK", "0")
    return RankInfo(int(rank), int(size), int(local), job_id, (socket.gethostname(),))


def extend_import_path() -> None:
    """Append the launcher's sys.path to this process's."""
    folders = os.environ.get(IMPORT_PATH, "").split(os.pathsep)
    sys.path += [folder for folder in dict.fromkeys(folders) if folder and folder not in sys.path]


def waiting_threads() -> dict[str, str]:
    """Variables by which OpenMP's idle threads spin for a moment, then sleep; empty where the user has set one.

    Spinning on, as by default, starves other processes: on two cores beside two busy ones, training was three times
    slower. Sleeping at once makes a small step a quarter slower on an idle machine.
    """
    policy = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
    return {} if policy.keys() & os.environ.keys() else policy


def rank_environment(
    cluster: ClusterConfig, world_size: int, attempt: int, rendezvous_folder: Path, *, world: World | None = None
) -> dict[str, str | None]:
    """Changes to the launcher's environment for the ranks (of one `world` of several); None unsets a variable.
    `rendezvous_folder` is a new folder on a local disk; unlike a port, no other job can take a file in it."""
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    ours = Path(titan_exp.__file__).resolve().parents[1]
    path += [] if ours.name in ("site-packages", "dist-packages") else [str(ours)]
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
        "PYTHONPATH": os.pathsep.join(path),
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


def loopback() -> str:
    """Name of the loopback interface, so that ranks connect without a network."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return "lo"
