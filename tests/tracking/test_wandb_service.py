"""wandb's service process must not delay our exit: tested with the real one, stopped by SIGSTOP."""

import os
import subprocess
import sys
import time
from pathlib import Path

STUCK = """
import os, signal, sys
import wandb
from titan_exp.tracking.sinks import service_pids, stop_wandb_service

wandb.setup()
pids = service_pids()
print(*pids, flush=True)
assert pids, "no service was started"
if sys.argv[1] == "stuck":
    os.kill(pids[0], signal.SIGSTOP)
stop_wandb_service(float(sys.argv[2]))
print("ended")
"""


def run(home: Path, state: str, seconds: float) -> tuple[list[int], float]:
    """Process ids of the services, and seconds until the pipes were closed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment |= {"HOME": str(home), "WANDB_ERROR_REPORTING": "false", "WANDB_MODE": "offline"}
    started = time.monotonic()
    # The service inherits the pipes: were it still alive, this would wait for it.
    done = subprocess.run(
        [sys.executable, "-c", STUCK, state, str(seconds)],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pids, _, said = done.stdout.partition("\n")
    assert said == "ended\n"
    return [int(pid) for pid in pids.split()], time.monotonic() - started


def test_stuck_service_is_killed(tmp_path: Path):
    pids, _ = run(tmp_path, "stuck", 1.0)
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_responsive_service_ends_itself(tmp_path: Path):
    pids, seconds = run(tmp_path, "well", 60.0)
    assert pids
    assert seconds < 60
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
