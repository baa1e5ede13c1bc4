"""Rendezvous by a file: rank 0 writes its address into the attempt's logs, which all hosts of a run share."""

import os
import socket
import time

from titan_exp.config.errors.user_error import UserError
from titan_exp.launch.rank.rank_env import RankInfo
from titan_exp.tracking.run_folder.run_folder import RunFolder, write_atomically

FIRST_PORT, LAST_PORT = 20000, 32000
"""Port range of the rendezvous, below the ephemeral ports."""
RENDEZVOUS_TIMEOUT = 60.0
"""Seconds to wait for rank 0's address: network disks may show new files late."""
LOOPBACK = "127.0.0.1"


def publish_address(folder: RunFolder, rank: RankInfo, address: str, job: int) -> None:
    """Write rank 0's address and a free port into the attempt's log folder; jobs of other numbers try other ports."""
    assert rank.attempt is not None
    logs = folder.make_attempt_logs(rank.attempt)
    write_atomically(logs / "meeting", f"{address} {free_port(job)}\n", durable=False)


def join_rendezvous(folder: RunFolder, rank: RankInfo) -> None:
    """Set MASTER_ADDR and MASTER_PORT to rank 0's address. Raises UserError if rank 0 has published none."""
    assert rank.attempt is not None
    path, deadline = folder.attempt_logs(rank.attempt) / "meeting", time.monotonic() + RENDEZVOUS_TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            raise UserError(f"{path} did not appear in {RENDEZVOUS_TIMEOUT:.0f} s. Is this folder shared by all nodes?")
        time.sleep(0.1)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = path.read_text(encoding="utf-8").split()
    if os.environ["MASTER_ADDR"] == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def free_port(job: int) -> int:
    """Find a free port, starting at an offset derived from the number of a job."""
    count = LAST_PORT - FIRST_PORT
    for offset in range(count):
        port = FIRST_PORT + (job * 7 + offset) % count
        with socket.socket() as candidate:
            try:
                candidate.bind(("", port))
            except OSError:
                continue
        return port
    raise UserError(f"No free port between {FIRST_PORT} and {LAST_PORT} on {socket.gethostname()}.")
