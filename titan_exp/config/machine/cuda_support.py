"""CUDA support of this machine, without torch: NVIDIA GPUs or a driver that torch cannot use, and the reason."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from titan_exp.config.machine import local_machine

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
"""File that a loaded NVIDIA driver shows."""

ON_PURPOSE = "cluster.device=cpu to train on the CPU on purpose"
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
        return f"this machine has {facts.found}, but {reason}", f"{remedy}; or {ON_PURPOSE}"
    return None


def _problems(facts: CudaFacts) -> Iterator[tuple[str, str]]:
    driver = facts.driver
    if facts.torch_cuda is None:
        yield f"torch {facts.torch} is built without CUDA", "install a CUDA build of torch"
    if facts.mask is not None and not facts.visible:
        reason = f"CUDA_VISIBLE_DEVICES={facts.mask!r} hides every GPU"
        yield reason, "unset CUDA_VISIBLE_DEVICES, or set it to indices of GPUs"
    if driver is None:
        return
    if driver.missing is not None:
        remedy = "start the container with its GPUs, or install the driver's libraries"
        yield f"the driver's library cannot be loaded ({driver.missing})", remedy
    needed = int(facts.torch_cuda.split(".")[0]) if facts.torch_cuda else 0
    if driver.version and driver.version // 1000 < needed:
        runs = f"{driver.version // 1000}.{driver.version % 1000 // 10}"
        reason = f"its driver runs CUDA {runs}, and torch {facts.torch} is built for CUDA {facts.torch_cuda}"
        yield reason, f"update the driver, or install a build of torch for CUDA {driver.version // 1000}"
    if driver.status:
        name = driver.name or "unknown error"
        yield f"the CUDA driver does not start ({name}, code {driver.status})", "see nvidia-smi and dmesg"
    elif driver.missing is None and not driver.count:
        yield "the CUDA driver shows no device", "see nvidia-smi -L; MIG needs compute instances"


@cache
def unusable_cuda() -> tuple[str, str] | None:
    """`cuda_problem` of this machine."""
    return cuda_problem(cuda_facts())


def cuda_facts() -> CudaFacts:
    """Facts of this machine. Asks the driver only if there is a trace of one."""
    version, built_for = torch_build()
    found = _traces()
    driver = _ask_driver() if found is not None and built_for is not None else None
    return CudaFacts(
        found, local_machine.visible_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"), version, built_for, driver
    )


def torch_build() -> tuple[str, str | None]:
    """Version of torch and of the CUDA that it is built for, from its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "(not installed)", None
    values = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return values["__version__"], values.get("cuda")


def _traces() -> str | None:
    if gpus := local_machine.present_gpus():
        return f"{gpus} NVIDIA GPU{'s' * (gpus > 1)}"
    if DRIVER_VERSION.exists():
        return "an NVIDIA driver"
    listed = sum(line.startswith("GPU ") for line in local_machine.command_lines("nvidia-smi", "-L"))
    return f"{listed} NVIDIA GPU{'s' * (listed > 1)}" if listed else None


def _ask_driver() -> DriverAnswer | None:
    with suppress(OSError, subprocess.SubprocessError, ValueError, TypeError):
        asked = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True)
        return DriverAnswer(**json.loads(asked.stdout))
    return None
