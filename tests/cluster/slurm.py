"""A real SLURM on this machine: four nodes with eight fake GPUs each, with its own munge, ports and folder.

It needs Debian's `slurm-wlm` and `munge`, and no rights: daemons and jobs run as the user who runs the tests.
"""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.accounting import Accounting

NODES = ("node1", "node2", "node3", "node4")
GPUS_PER_NODE = 8
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scontrol")
START_LIMIT = 60.0
"""Seconds for a daemon to come up, on a busy machine."""
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits for as long as the credential of its first start may live, 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/controller
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmctldTimeout=60
SlurmdTimeout=60
KillWait=5
MinJobAge=300
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=1
SlurmdParameters=config_overrides
GresTypes=gpu
{accounting}
{nodes}
PartitionName=h100 Nodes=node[1-4] Default=YES MaxTime=INFINITE OverSubscribe=NO
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=256000 Gres=gpu:h100:8"


class Slurm:
    """The daemons, and what a test says to them. Nothing of it outlives `stop`, nor this process.

    Args:
        accounting: also start MariaDB and slurmdbd, so that `sacct` answers.
    """

    def __init__(self, *, accounting: bool = False) -> None:
        # Not under pytest's folders: munge wants a path that everybody may enter, and a socket a short one.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        self.config = self.folder / "slurm.conf"
        """slurm.conf."""
        self.environment = {**_outside_of_jobs(), "SLURM_CONF": str(self.config)}
        """For processes that talk to this SLURM: this process's environment, with SLURM_CONF."""
        self._controller: subprocess.Popen[bytes] | None = None
        self._daemons: list[subprocess.Popen[bytes]] = []
        keeper = [sys.executable, str(Path(__file__).with_name("keeper.py")), str(self.folder)]
        self._keeper = subprocess.Popen(keeper, stdin=subprocess.PIPE, start_new_session=True, env=_outside_of_jobs())
        try:
            self._start(accounting)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End every job and daemon, and remove the folder."""
        self._keeper.communicate(timeout=120)  # it ends all when its input closes, also where this process is killed
        for daemon in self._daemons:
            daemon.wait(timeout=10)

    def run(self, *words: str, limit: float = 60.0, check: bool = True) -> str:
        """Run a command against this SLURM and return what it prints; where it fails, AssertionError with that."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=limit, check=False, cwd=self.folder
        )
        assert not check or done.returncode == 0, (
            f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout

    def path(self, program: str) -> str:
        """Path of one of SLURM's programs."""
        found = shutil.which(program)
        assert found is not None
        return found

    def sbatch(self, script: str, *options: str) -> int:
        """Submit a batch script, its text; returns the number of the job. It prints into `output(job)`."""
        with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".sh") as file:
            file.write(f"#!/bin/bash\n{script}\n")
            file.flush()
            output = f"--output={self.folder}/job-%j.out"
            return int(
                self.run("sbatch", "--parsable", output, "--open-mode=append", *options, file.name).split(";")[0]
            )

    def output(self, job: int) -> str:
        """What a job submitted by `sbatch` has printed so far."""
        path = self.folder / f"job-{job}.out"
        return path.read_text() if path.exists() else ""

    def queue(self) -> dict[str, str]:
        """State of every job and array task that waits or runs, by its number (`12`, `13_4`)."""
        lines = self.run("squeue", "--noheader", "--array", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def job(self, job: int | str) -> dict[str, str]:
        """What `scontrol show job` says of a job: `JobState`, `Reason`, `ExitCode`, `Restarts`, `NodeList`, ..."""
        text = self.run("scontrol", "--oneliner", "show", "job", str(job)).splitlines()[0]
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_for(self, job: int | str, *states: str, limit: float = 60.0) -> dict[str, str]:
        """Wait until a job is in one of the states (`RUNNING`, `COMPLETED`, ...); returns what `job` says then."""
        return self.wait_until(lambda: (now := self.job(job))["JobState"] in states and now, f"{job} {states}", limit)

    def wait_until(self, status: Callable[[], Any], what: str, limit: float = 60.0) -> Any:
        """Wait until `status` returns something true, and return that; AssertionError says what did not come."""
        deadline = time.monotonic() + limit
        while True:
            found = status()
            if found:
                return found
            assert time.monotonic() < deadline, f"not within {limit:.0f} s: {what}\n{self.state()}"
            time.sleep(0.2)

    def tidy(self) -> None:
        """Cancel every job, give every node back, and wait until all are idle: between tests."""
        self.run("scancel", "--state=PENDING", f"--user={getpass.getuser()}", check=False)
        self.run("scancel", f"--user={getpass.getuser()}", check=False)
        self.wait_until(lambda: not self.queue(), "an empty queue")
        for node, state in self.nodes().items():
            if state.startswith(("drain", "down")):
                self.resume(node)
        self.wait_until(lambda: set(self.nodes().values()) == {"idle"}, "four idle nodes")

    def drain(self, node: str) -> None:
        """Take a node from the jobs to come, as an administrator does."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")

    def fail(self, node: str) -> None:
        """Declare a node down: its jobs end as NODE_FAIL, or are requeued."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def resume(self, node: str) -> None:
        """Give a drained or dead node back, and wait until it is idle or in use."""
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.wait_until(lambda: self.nodes()[node] in ("idle", "mixed", "allocated"), f"{node} back")

    def nodes(self) -> dict[str, str]:
        """State of every node, as `sinfo` says it."""
        return dict(line.split() for line in self.run("sinfo", "--noheader", "-N", "--format=%N %T").splitlines())

    def restart_controller(self, *, down: float = 0.0) -> None:
        """Stop slurmctld, leave it away for so many seconds, and start it again with its saved state."""
        self.stop_controller()
        time.sleep(down)
        self.start_controller()

    def forget_ended_jobs(self) -> None:
        """Have slurmctld know of no job any more, as it is minutes after their end; none may wait or run."""
        assert not self.queue()
        self.stop_controller()
        for path in (self.folder / "controller").glob("job_state*"):
            path.unlink()
        self.start_controller()

    def stop_controller(self) -> None:
        """Stop slurmctld; running jobs continue."""
        assert self._controller is not None
        self._controller.terminate()
        self._controller.wait(timeout=60)
        self._daemons.remove(self._controller)

    def start_controller(self) -> None:
        """Start slurmctld, and wait until it answers and, after a restart, has heard from every node again."""
        self._controller = self._daemon("slurmctld", "-D")
        self.wait_until_quietly(lambda: " UP" in self.run("scontrol", "ping", check=False), "slurmctld")
        if len(self._daemons) > len(NODES):
            self.wait_until(lambda: "*" not in "".join(self.nodes().values()), "every node's answer")

    def state(self) -> str:
        """Queue and nodes, for messages."""
        return self.run("squeue", "--all", check=False) + self.run("sinfo", "-N", "--long", check=False)

    def _start(self, accounting: bool) -> None:
        ports = free_ports(len(NODES) + 3)
        self._start_munge()
        lines, database = "AccountingStorageType=accounting_storage/none", None
        if accounting:
            database = Accounting(self.folder, self.environment, ports[-2:])
            database.start(self._daemon, self.wait_for_file)
            lines = database.lines
        self._write_config(ports, lines)
        if database is not None:
            self.wait_until_quietly(database.knows_the_cluster, "slurmdbd that answers")
        self.start_controller()
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node, log=node)
        self.wait_until(lambda: set(self.nodes().values()) == {"idle"}, "four idle nodes", START_LIMIT)

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o400)
        key.chmod(0o600)
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "log", "pid", "seed")]
        self._daemon("munged", "--foreground", f"--socket={self.folder}/munge.socket", *files)
        self.wait_for_file("munge.socket")

    def _write_config(self, ports: Sequence[int], accounting: str) -> None:
        nodes = "\n".join(NODE.format(name=name, port=port) for name, port in zip(NODES, ports[1:], strict=False))
        self.config.write_text(
            CONFIG.format(folder=self.folder, user=getpass.getuser(), ports=ports, nodes=nodes, accounting=accounting)
        )
        for number in range(GPUS_PER_NODE):
            (self.folder / f"gpu{number}").symlink_to("/dev/null")  # slurmd takes nothing but devices
        gres = f"NodeName=node[1-4] Name=gpu Type=h100 File={self.folder}/gpu[0-7]\n"
        (self.folder / "gres.conf").write_text(gres)
        (self.folder / "controller").mkdir(mode=0o700)
        for node in NODES:
            (self.folder / node).mkdir(mode=0o755)

    def _daemon(self, program: str, *words: str, log: str | None = None) -> subprocess.Popen[bytes]:
        """Start a daemon in the foreground in its own session, so that Ctrl-C does not reach it."""
        path = shutil.which(program, path=f"{os.environ['PATH']}:{SYSTEM_PATH}")
        assert path is not None, program
        with (self.folder / f"{log or program}.out").open("ab") as output:
            daemon = subprocess.Popen(
                [path, *words],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._daemons.append(daemon)
        return daemon

    def wait_for_file(self, name: str) -> None:
        """Wait until a daemon has made its file."""
        self.wait_until_quietly((self.folder / name).exists, name)

    def wait_until_quietly(self, status: Callable[[], bool], what: str) -> None:
        """Wait before there is a controller to ask; the daemons' own output says why it did not come."""
        deadline = time.monotonic() + START_LIMIT
        while not status():
            assert time.monotonic() < deadline, f"no {what}:\n" + "\n".join(
                f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}"
                for path in sorted(self.folder.glob("*.out")) + sorted(self.folder.glob("*.log"))
            )
            time.sleep(0.1)


def missing_programs(names: Sequence[str] = PROGRAMS) -> list[str]:
    """Programs that this machine lacks."""
    return [name for name in names if shutil.which(name, path=f"{os.environ['PATH']}:{SYSTEM_PATH}") is None]


def free_ports(count: int) -> list[int]:
    """Distinct free ports of this machine."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def _outside_of_jobs() -> dict[str, str]:
    """This process's environment without variables of a surrounding SLURM job."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
