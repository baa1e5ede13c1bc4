"""What this machine has, found out without torch."""

import os
import re
import shutil
import subprocess
from pathlib import Path

DEVICES = Path("/dev")
"""Where device files are."""

DRIVER = Path("/proc/driver/nvidia/gpus")
"""Where the driver lists what it found."""


def visible_gpus() -> int:
    """Number of NVIDIA GPUs that a process started here would see, `CUDA_VISIBLE_DEVICES` honoured."""
    present = _gpus_present()
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return present
    chosen = 0
    for entry in (part.strip() for part in mask.split(",")):
        # CUDA stops at the first entry that names no device; names that are no numbers are UUIDs of GPUs or MIG slices.
        if not entry or (re.fullmatch(r"-?\d+", entry) and not 0 <= int(entry) < present):
            break
        chosen += 1
    return chosen if present else 0


def _gpus_present() -> int:
    # In a container only the device files it was given count; the driver's folder lists every GPU of the host.
    files = [path for path in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if files:
        return len(files)
    if (DEVICES / "dxg").exists():  # Windows' Linux subsystem: no device files, but the driver's tool
        return _gpus_of_the_driver()
    return len(list(DRIVER.iterdir())) if DRIVER.is_dir() else 0


def _gpus_of_the_driver() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False)
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())
