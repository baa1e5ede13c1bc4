"""Disk write rate, and SLURM partitions."""

import os
import time
from pathlib import Path

from titan_exp.config.machine.local_machine import command_lines
from titan_exp.doctor.measurement import Measurement

BLOCK_BYTES, MAX_BYTES = 2**24, 2**32
"""Bytes per write, and in total."""


def disk_rate(folder: Path, limit: float) -> Measurement:
    """Measure synced writes to a temporary file in `folder` for `limit` seconds."""
    name = f"write to {folder}"
    path = folder / f".doctor.{os.getpid()}.tmp"
    block, written = os.urandom(BLOCK_BYTES), 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            begin = time.perf_counter()
            with path.open("wb", buffering=0) as file:
                while written < MAX_BYTES and time.perf_counter() - begin < limit / 2:
                    written += file.write(block)
                    # Measure the disk, not the page cache.
                    os.fsync(file.fileno())
            seconds = time.perf_counter() - begin
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        return Measurement("disk", name, None, "GB/s", note=f"not writable: {error.strerror or error}")
    return Measurement("disk", name, written / 1e9 / seconds, "GB/s", seconds, note="one file, fsync every 16 MiB")


def scheduler() -> list[str]:
    """SLURM partitions as `name: state, nodes, generic resources`; empty without SLURM."""
    return command_lines("sinfo", "--noheader", "--format=%P: %a, %D nodes, %G, at most %l")
