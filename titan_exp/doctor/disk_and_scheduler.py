"""What is around the devices: how quickly the disk of the runs takes data, and which scheduler answers."""

import os
import shutil
import subprocess
import time
from pathlib import Path

from titan_exp.doctor.timing import Measurement

BLOCK, MOST = 2**24, 2**32
"""Bytes written at a time, and in all."""


def disk_rate(folder: Path, limit: float) -> Measurement:
    """Write a file in `folder` for `limit` seconds, until the disk has it, and remove it."""
    name = f"write to {folder}"
    path = folder / f".doctor.{os.getpid()}.tmp"
    block, written = os.urandom(BLOCK), 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            begin = time.perf_counter()
            with path.open("wb", buffering=0) as file:
                while written < MOST and time.perf_counter() - begin < limit / 2:
                    written += file.write(block)
                    # The disk, and not the memory in front of it.
                    os.fsync(file.fileno())
            seconds = time.perf_counter() - begin
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        return Measurement("disk", name, None, "GB/s", note=f"not here: {error.strerror or error}")
    return Measurement("disk", name, written / 1e9 / seconds, "GB/s", seconds, note="one file, waited for every 16 MiB")


def scheduler() -> list[str]:
    """The partitions of SLURM, as `name: state, nodes, generic resources`; empty where no SLURM answers."""
    tool = shutil.which("sinfo")
    if tool is None:
        return []
    asked = [tool, "--noheader", "--format=%P: %a, %D nodes, %G, at most %l"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines() if answer.returncode == 0 else []
