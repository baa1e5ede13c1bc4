"""Hardware of the local machine, detected without torch."""

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

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
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return present
    count = 0
    for entry in (part.strip() for part in mask.split(",")):
        # CUDA stops at the first invalid entry; non-numeric entries are UUIDs of GPUs or MIG slices.
        if not entry or (re.fullmatch(r"-?\d+", entry) and not 0 <= int(entry) < present):
            break
        count += 1
    return count if present else 0


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
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def present_gpus() -> int:
    """Number of NVIDIA GPUs of this machine or container, hidden ones included."""
    # A container has device files only for its GPUs; the driver's folder lists all GPUs of the host.
    files = [path for path in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if files:
        return len(files)
    if (DEVICES / "dxg").exists():  # WSL: no device files, but nvidia-smi exists
        return sum(line.startswith("GPU ") for line in command_lines("nvidia-smi", "-L"))
    return len(list(DRIVER.iterdir())) if DRIVER.is_dir() else 0
