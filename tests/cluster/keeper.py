"""Stops a test's SLURM when the test process exits, which closes this process's input.

`python keeper.py FOLDER`. Every process of this SLURM, jobs too, has its folder in the environment or the command line.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil


def main(folder: str) -> None:
    """Wait for the end of the input; then end jobs, daemons and folder."""
    sys.stdin.buffer.read()
    environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        jobs = ["squeue", "--noheader", "--format=%A"]
        numbers = subprocess.run(jobs, env=environment, capture_output=True, text=True, timeout=10, check=False).stdout
        if numbers.strip():
            cancel = ["scancel", "--signal=KILL", "--full", *numbers.split()]
            subprocess.run(cancel, env=environment, capture_output=True, timeout=10, check=False)
    for _ in range(10):  # a daemon may have started one more while it was looked for
        members = belonging_to(folder)
        for process in members:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not psutil.wait_procs(members, timeout=2) or not members:
            break
    shutil.rmtree(folder, ignore_errors=True)


def belonging_to(folder: str) -> list[psutil.Process]:
    """Live processes of the SLURM in a folder, without this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            ours = process.environ().get("SLURM_CONF", "") == f"{folder}/slurm.conf"
            if ours or any(f"{folder}/" in word for word in process.cmdline()):
                found.append(process)
    return found


if __name__ == "__main__":
    main(str(Path(sys.argv[1])))
