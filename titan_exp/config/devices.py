"""Devices of this machine and of the cluster: counted, usable or not and why, and their allocators."""

import ctypes
import importlib.util
import json
import os
import platform
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Literal

from titan_exp.config.groups.parallelism import CompileConfig
from titan_exp.config.groups.run import ClusterConfig

DEVICES = Path("/dev")
"""Folder of device files."""
DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder of the driver's list of GPUs."""
CONTROL_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Folder of control groups, and the file with this process's groups: `0::/path` in version 2 (cgroups(7))."""
VMSTAT = Path("/proc/vmstat")
"""Linux's memory counters."""


def visible_gpus() -> int:
    """Number of NVIDIA GPUs visible to a process with the current `CUDA_VISIBLE_DEVICES`."""
    present = present_gpus()
    if (mask := os.environ.get("CUDA_VISIBLE_DEVICES")) is None or not present:
        return present

    def is_valid(entry: str) -> bool:
        """True for the index of a GPU, and for what is no number: the UUID of a GPU or MIG slice."""
        return bool(entry) and (not re.fullmatch(r"-?\d+", entry) or 0 <= int(entry) < present)

    return len([*takewhile(is_valid, map(str.strip, mask.split(",")))])  # as CUDA stops at the first invalid entry


@cache
def gpu_names() -> list[str]:
    """Names of this machine's GPUs, as torch reports them; empty if unknown."""
    found = []
    for path in sorted(DRIVER.glob("*/information")):
        try:
            name = re.search(r"^Model:[ \t]*(.+?)[ \t]*$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        found += [name[1]] if name else []
    return found


@cache
def gpu_memory_bytes() -> int | None:
    """Bytes of this machine's smallest GPU that CUDA can allocate, from the driver; None if unknown."""
    lines = command_lines("nvidia-smi", "--query-gpu=memory.total,memory.reserved", "--format=csv,noheader,nounits")
    # The driver keeps the reserved part to itself.
    found = [re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", line) for line in lines]
    return min(((int(sizes[1]) - int(sizes[2])) * 2**20 for sizes in found if sizes), default=None)


@cache
def cpu_model() -> str:
    """Model name of the CPU."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1]
    return platform.processor() or platform.machine()


def cpu_name() -> str:
    """Model name of the CPU and number of cores of the machine."""
    return f"{cpu_model()}, {os.cpu_count()} cores"


def command_lines(*command: str) -> list[str]:
    """Output lines of a command; empty if it is not installed, fails, or takes longer than 20 s."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return result.stdout.splitlines() if result.returncode == 0 else []


def host_memory() -> int | None:
    """Bytes of host memory, at most the limits of this process's control group and of those above it (containers,
    SLURM's jobs, systemd's services); None if unknown."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    for path in _group_limits():
        with suppress(OSError, ValueError):  # "max": no limit
            total = min(total, int(path.read_text()))
    return total


def _group_limits() -> Iterator[Path]:
    folder, own = CONTROL_GROUPS
    groups = {"": "/", "memory": "/"}
    with suppress(OSError):
        groups |= {kind: path for _, kind, path in (line.split(":", 2) for line in own.read_text().splitlines())}
    for kind, mounts, name in (("", ("", "unified"), "memory.max"), ("memory", ("memory",), "memory.limit_in_bytes")):
        group = PurePosixPath(groups[kind])  # its folder is absent in a container that sees its own group as the root
        for path in (group, *group.parents):
            yield from (folder / mount / path.relative_to("/") / name for mount in mounts)


def count_oom_kills() -> int:
    """Number of out-of-memory kills on this machine since its boot, those at a container's limit included; 0 if
    unknown."""
    with suppress(OSError, ValueError):
        counters = dict(line.split() for line in VMSTAT.read_text().splitlines())
        return int(counters.get("oom_kill", 0))
    return 0


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def present_gpus() -> int:
    """Number of NVIDIA GPUs of this machine or container, hidden ones included."""
    # A container has device files only for its GPUs; the driver's folder lists all GPUs of the host.
    files = [path for path in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if files:
        return len(files)
    if (DEVICES / "dxg").exists():  # WSL: no device files, but nvidia-smi exists
        return sum(line.startswith("GPU ") for line in command_lines("nvidia-smi", "-L"))
    return len(list(DRIVER.iterdir())) if DRIVER.is_dir() else 0


DRIVER_VERSION = Path("/proc/driver/nvidia/version")
"""File that a loaded NVIDIA driver shows."""
ON_PURPOSE = "use cluster.device=cpu to train on the CPU on purpose"
"""Override that asks for the CPU where a GPU was found."""

_PROBE = """
import ctypes, json
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print(json.dumps({"missing": str(error)}))
else:
    status, version, count = cuda.cuInit(0), ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    if status == 0:
        status = cuda.cuDeviceGetCount(ctypes.byref(count))
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(name))
    print(json.dumps({"status": status, "name": (name.value or b"").decode(), "version": version.value,
                      "count": count.value}))
"""
"""Program that asks the CUDA driver; a process of its own, because a process that asked cannot fork ranks."""


@dataclass(frozen=True)
class DriverAnswer:
    """Answer of the CUDA driver library to a new process."""

    missing: str | None = None
    """Error of loading libcuda.so.1; None if it was loaded."""
    status: int = 0
    """CUDA error code of the initialization; 0 is success."""
    name: str = ""
    """Name of that code."""
    version: int = 0
    """Newest CUDA version that the driver runs, 1000 · major + 10 · minor."""
    count: int = 0
    """Visible devices."""


@dataclass(frozen=True)
class CudaFacts:
    """Traces of NVIDIA hardware and what torch needs to use it."""

    found: str | None
    """GPUs or driver that this machine shows; None if it shows neither."""
    visible: int
    """GPUs that `CUDA_VISIBLE_DEVICES` leaves."""
    mask: str | None
    """`CUDA_VISIBLE_DEVICES`."""
    torch: str
    """Version of torch."""
    torch_cuda: str | None
    """CUDA version that torch is built for; None for a build without CUDA."""
    driver: DriverAnswer | None
    """The driver's answer; None if it could not be asked."""


def cuda_problem(facts: CudaFacts) -> tuple[str, str] | None:
    """Reason for which torch cannot use what was found, and the remedy; None if nothing was found, or it can."""
    if facts.found is None:
        return None
    for reason, remedy in _problems(facts):
        return f"this machine has {facts.found}, but {reason}", f"{remedy}, or {ON_PURPOSE}"
    return None


def _problems(facts: CudaFacts) -> Iterator[tuple[str, str]]:
    driver = facts.driver
    if facts.torch_cuda is None:
        yield f"torch {facts.torch} is a build without CUDA", "install a CUDA build of torch"
    if facts.mask is not None and not facts.visible:
        reason = f"CUDA_VISIBLE_DEVICES={facts.mask!r} hides every GPU"
        yield reason, "unset CUDA_VISIBLE_DEVICES, or set it to the indices of GPUs"
    if driver is None:
        return
    if driver.missing is not None:
        remedy = "start the container with its GPUs, or install the driver's libraries"
        yield f"torch cannot load the driver's library ({driver.missing})", remedy
    needed = int(facts.torch_cuda.split(".")[0]) if facts.torch_cuda else 0
    if driver.version and driver.version // 1000 < needed:
        runs = f"{driver.version // 1000}.{driver.version % 1000 // 10}"
        reason = f"its driver runs CUDA {runs}, and torch {facts.torch} needs CUDA {facts.torch_cuda}"
        yield reason, f"update the driver, or install a build of torch for CUDA {driver.version // 1000}"
    if driver.status:
        name = driver.name or "unknown error"
        yield f"the CUDA driver does not start ({name}, code {driver.status})", "look at what nvidia-smi and dmesg say"
    elif driver.missing is None and not driver.count:
        yield "the CUDA driver shows no device", "look at what nvidia-smi -L lists (MIG needs compute instances)"


@cache
def unusable_cuda() -> tuple[str, str] | None:
    """`cuda_problem` of this machine."""
    return cuda_problem(cuda_facts())


def cuda_facts() -> CudaFacts:
    """Facts of this machine. Asks the driver only if there is a trace of one."""
    (version, built_for), found, driver = torch_build(), _traces(), None
    if found is not None and built_for is not None:
        with suppress(OSError, subprocess.SubprocessError, ValueError, TypeError):
            command = [sys.executable, "-c", _PROBE]
            asked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            driver = DriverAnswer(**json.loads(asked.stdout))
    return CudaFacts(found, visible_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"), version, built_for, driver)


def torch_build() -> tuple[str, str | None]:
    """Version of torch and of the CUDA that it is built for, from its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "(not installed)", None
    values = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return values["__version__"], values.get("cuda")


def _traces() -> str | None:
    gpus = present_gpus()
    if not gpus and DRIVER_VERSION.exists():
        return "an NVIDIA driver"
    gpus = gpus or sum(line.startswith("GPU ") for line in command_lines("nvidia-smi", "-L"))
    return f"{gpus} NVIDIA GPU{'s' * (gpus > 1)}" if gpus else None


def device_type(cluster: ClusterConfig) -> Literal["cpu", "cuda"]:
    """Device type of `cluster.device`; `auto` is CUDA if this machine has a GPU. A rule rejects `auto` for SLURM."""
    if cluster.device != "auto":
        return cluster.device
    return "cuda" if visible_gpus() else "cpu"


def has_triton() -> bool:
    """True if Triton is installed where runs on GPUs take place: elsewhere, if this torch has no CUDA. Torch for CUDA
    brings it."""
    return importlib.util.find_spec("triton") is not None or torch_build()[1] is None


def offered_devices(cluster: ClusterConfig) -> int:
    """Number of devices for `parallelism.dp_shard=-1`, of each world of a run; a CPU machine offers one process."""
    if device_type(cluster) == "cpu":
        return 1
    devices = (cluster.nodes or 1) * (cluster.gpus_per_node or visible_gpus())
    # Worlds share this machine; elsewhere each has a job with nodes of its own.
    return devices if cluster.is_remote else devices // cluster.worlds


def process_threads(cluster: ClusterConfig, world_size: int) -> int:
    """Threads of each process of a run on this machine, whose cores all ranks of all worlds share."""
    return cluster.threads_per_process or max(1, usable_cores() // (world_size * cluster.worlds))


def node_size(cluster: ClusterConfig, world_size: int) -> int:
    """Processes on a full node: one per GPU; on CPU `cluster.processes_per_node`, or all processes."""
    if device_type(cluster) == "cpu":
        return cluster.processes_per_node or world_size
    return cluster.gpus_per_node or visible_gpus() or 1


ALLOC_CONF = "PYTORCH_ALLOC_CONF"
"""Variable that torch 2.9 and later read first."""
EXPANDABLE = "expandable_segments:True"
USER_SETTINGS = (ALLOC_CONF, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables by which users set the allocator themselves."""
NCCL_REGISTRATION = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
"""Variable that registers segments with NCCL, which torch refuses for expandable ones."""


def uses_expandable_segments(cluster: ClusterConfig, compilation: CompileConfig) -> bool:
    """True if ranks allocate in expandable segments. Not with CUDA graphs, whose pools some versions of torch leave in
    fixed segments, and with which replays are reported to hang in others."""
    return cluster.expandable_segments and device_type(cluster) == "cuda" and not compilation.cuda_graphs


def allocator_environment(
    cluster: ClusterConfig, compilation: CompileConfig, environment: Mapping[str, str]
) -> dict[str, str]:
    """Variables to set before a rank starts CUDA; none if `environment` has settings of the user's."""
    own = any(name in environment for name in USER_SETTINGS)
    registered = environment.get(NCCL_REGISTRATION, "0").lower() not in ("", "0", "false", "n", "no")
    if own or registered or not uses_expandable_segments(cluster, compilation):
        return {}
    return {ALLOC_CONF: EXPANDABLE}


VARIABLE = "MALLOC_MMAP_THRESHOLD_"
"""Variable by which users set the threshold themselves; see mallopt(3)."""
M_MMAP_THRESHOLD = -3
"""Parameter of malloc.h: size from which memory is mapped, and goes back to the system when it is freed."""


def return_freed_memory(smallest: int) -> None:
    """Give memory of `smallest` bytes and more back to the system when it is freed; without effect beside glibc.
    Otherwise glibc raises the size to that of the largest freed block, up to 32 MiB. Mapped memory costs page faults: a
    CPU trains as fast from 4 MiB on, and a quarter slower from 1 MiB on (llama_laptop, 12 steps on two cores: 12 s of
    user time each, 1.3 and 4.3 s of system time)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and VARIABLE not in os.environ:
        mallopt(M_MMAP_THRESHOLD, smallest)
