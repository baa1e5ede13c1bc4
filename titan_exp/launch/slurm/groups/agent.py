"""Agent of a replica group: a child of the group's rank 0, which ends with it.

`python -m titan_exp.launch.slurm.groups.agent RUN_FOLDER ATTEMPT LOGS NUMBER PORT PORT` forwards to the lighthouse,
serves it if no other group does, and tells others that the group lives. It prints its ports, of which 0 asks for a free
one.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.launch.slurm.groups.election import POLL_INTERVAL, Candidate, lighthouse_address
from titan_exp.launch.slurm.groups.servers import Forwarder, LifeSign
from titan_exp.tracking.run_folder.group_events import record_event
from titan_exp.tracking.run_folder.run_folder import RunFolder
from titan_exp.tracking.run_folder.state import STOPPED

END_LIMIT = 10.0
"""Seconds for a group to end after the attempt has ended; a newcomer has no group to heal from."""
RESTART_SECONDS = 1.0
"""Seconds between two starts of an agent that fails."""


@dataclass(frozen=True)
class Ports:
    """Ports of an agent."""

    lighthouse: int = 0
    """Forwards to the lighthouse, on the loopback interface."""
    life_sign: int = 0


def start_agent(folder: RunFolder, attempt: int, logs: str, number: int) -> Ports:
    """Start the agent of a start of group `number`, and again whenever it fails, at the same ports. Once the attempt is
    over, this process ends. Raises UserError if it does not start."""

    def start(ports: Ports) -> tuple[subprocess.Popen[str], Ports]:
        words = [str(folder.path), str(attempt), logs, str(number), str(ports.lighthouse), str(ports.life_sign)]
        command = [sys.executable, "-m", "titan_exp.launch.slurm.groups.agent", *words]
        # A lighthouse logs several lines in every step otherwise.
        variables = {**os.environ, "RUST_LOG": os.environ.get("RUST_LOG", "warn")}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=variables)
        assert process.stdout is not None
        line = process.stdout.readline().split()
        return process, Ports(*map(int, line)) if len(line) == 2 else ports

    process, ports = start(Ports())
    if not ports.lighthouse:
        raise UserError(f"replica group {number}: its agent did not start. See the log of its rank 0.")

    def supervise(process: subprocess.Popen[str]) -> None:
        while process.wait() != STOPPED:
            time.sleep(RESTART_SECONDS)
            process, _ = start(ports)
        os._exit(STOPPED)

    threading.Thread(target=supervise, args=(process,), name="titan_exp agent", daemon=True).start()
    return ports


def main(arguments: Sequence[str]) -> int:
    """Serve until rank 0 has ended; returns 85 once the attempt is over."""
    path, logs = arguments[0], arguments[2]
    attempt, number, *ports = (int(word) for word in (arguments[1], *arguments[3:]))
    folder, parent = RunFolder(path), os.getppid()
    cluster, shared = load_experiment(folder.config, trust=True).cluster, folder.attempt_logs(attempt)
    forwarder, life_sign = Forwarder(ports[0], lambda: lighthouse_address(shared)), LifeSign(ports[1], logs)
    print(forwarder.port, life_sign.port, flush=True)
    candidate = Candidate(
        shared, number, cluster, lambda: record_event(folder, attempt, event="lighthouse started", group=number)
    )
    over_since: float | None = None
    while os.getppid() == parent:
        try:
            if not candidate.poll():
                return 1  # with its lighthouse; rank 0 starts it again
            forwarder.drop_others(lighthouse_address(shared))
            over_since = (over_since or time.monotonic()) if _is_over(folder, attempt) else None
        except (OSError, UserError) as error:  # a network disk may be away for a while
            print(f"agent of replica group {number}: {error}", file=sys.stderr, flush=True)
        if over_since is not None and time.monotonic() - over_since > END_LIMIT:
            return STOPPED
        time.sleep(POLL_INTERVAL)
    return 0


def _is_over(folder: RunFolder, attempt: int) -> bool:
    newest = folder.read_attempts()[-1]
    return newest.attempt != attempt or newest.end is not None


if __name__ == "__main__":
    # Without the destructors of the server's threads.
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
