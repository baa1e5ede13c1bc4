"""Rank processes on this machine: the ranks of a run, or short-lived ones that call one function.

Submitit's local controller starts them and waits for every rank, so that peers of a failed one would block forever. The
launcher therefore polls each rank and kills all of them soon after the first failure. `python -m
titan_exp.launch.local.ranks RUN_FOLDER` runs one, and unpickles nothing, since other users may write into the folder.
"""

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from titan_exp.config.devices import count_oom_kills
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.typed_config import to_yaml
from titan_exp.launch import attempt_end
from titan_exp.launch.attempt_end import AttemptResult, RankFailure
from titan_exp.launch.rank import rank_env
from titan_exp.launch.rank.main import RANK_MAIN, run_rank
from titan_exp.launch.run_console import Interrupts, block_terminal_signals
from titan_exp.launch.watchdog import REPORT_TIMEOUT, HangFiles
from titan_exp.tracking.run_folder import files
from titan_exp.tracking.run_folder.run import Run
from titan_exp.tracking.run_folder.run_folder import RunFolder, RunState, World, write_atomically

GRACE = 3.0  # seconds after the first failure that ranks have to record their error and exit
LINGER = 30.0  # seconds that processes have to exit once every rank has recorded its end
START_LIMIT = 60.0  # seconds that all other rank processes have to appear after the first
TEN_YEARS = 10 * 365 * 24 * 60  # timeout in minutes, which submitit's controller requires


class LocalRanks:
    """Rank processes of one attempt, or of one start of one of its worlds; the caller holds the run lock."""

    def __init__(self, layout: ResolvedLayout, folder: RunFolder, attempt: int, world: World | None = None) -> None:
        self._world = world
        if world is not None:
            folder = folder.with_world(world.logs)
        self.folder, self.attempt = folder, attempt
        self.world_size = layout.world_size
        self.logs = folder.attempt_logs(attempt)
        self._hang = HangFiles(self.logs, self.world_size)
        self.job_id = ""  # pid of submitit's controller
        self._cluster = layout.cluster
        self._rendezvous_folder: Path | None = None
        self._folder_lock: files.FileLock | None = None
        self._job: subprocess.Popen[bytes] | None = None
        self._controller: psutil.Process | None = None
        self._processes: dict[int, psutil.Process] = {}
        self._last_seen: dict[int, float] = {}
        self._records: dict[int, rank_env.RankRecord] = {}
        self._failures: dict[int, RankFailure] = {}
        self._oom_kills = count_oom_kills()
        # These times are on the monotonic clock.
        self._first_seen: float | None = None
        self._first_death: float | None = None
        self._all_ended: float | None = None
        self._killed = False

    def log(self, rank: int) -> Path:
        """Path of a rank's log."""
        return self.logs / f"rank-{rank:05d}.log"

    def start(self) -> None:
        """Start all ranks. Raises OSError if the logs cannot be written."""
        from submitit.local.local import start_controller

        self.folder.make_attempt_logs(self.attempt)
        files.remove_stale_temporary_folders()
        scratch, self._folder_lock = files.create_temporary_folder()
        self._rendezvous_folder, size = scratch, self.world_size
        command = shlex.join([sys.executable, "-u", "-m", "titan_exp.launch.local.ranks", str(self.folder.path)])
        changes = rank_env.rank_environment(self._cluster, size, self.attempt, scratch, world=self._world)
        logs = self.logs
        if "%" in str(logs):  # submitit would replace %j and %t
            logs = scratch / "logs"
            logs.symlink_to(self.logs.absolute())
        options = {"tasks_per_node": size, "timeout_min": TEN_YEARS, "stderr_to_stdout": True}
        with rank_env.environment(changes), block_terminal_signals(), _output_to(self.logs / "controller.log"):
            self._job = start_controller(logs, command, **options)
        self.job_id = str(self._job.pid)
        with contextlib.suppress(psutil.Error):
            self._controller = psutil.Process(int(self.job_id))
        for rank in range(self.world_size):
            with contextlib.suppress(FileExistsError):
                self.log(rank).symlink_to(f"{self.job_id}_{rank}_log.out")

    def poll(self) -> bool:
        """Poll all ranks; returns True once they and the controller have exited."""
        now, over = time.monotonic(), self._over()
        self._find_processes()
        for rank in range(self.world_size):
            self._update(rank, over)
        if self._first_death is None and (self._failures or (over and self._any_alive())):
            self._first_death = now
        if self._all_ended is None and all(self._has_ended(rank) for rank in range(self.world_size)):
            self._all_ended = now
        if over and not self._any_alive():
            return True
        # This also covers a controller that exited before the ranks, in addition to their parent watchdogs.
        grace = 2 * REPORT_TIMEOUT if self._hang.report_pending() else GRACE
        if _is_past(self._first_death, grace) or _is_past(self._all_ended, LINGER):
            self.kill()
        return False

    def news(self) -> Iterable[str]:
        """Return no lines, because the logs already have them all."""
        return ()

    def kill(self) -> None:
        """Kill all ranks, and the controller if it does not exit on its own."""
        self._killed = True
        self._find_processes()
        _kill_trees(self._processes.values())
        if not files.wait_until(self._over, GRACE) and self._controller is not None:
            _kill_trees([self._controller])
            files.wait_until(self._over, GRACE)

    def close(self) -> None:
        """Kill remaining ranks, then remove the rendezvous folder and empty stack files."""
        if self._job is not None and (not self._over() or self._any_alive()):
            self.kill()
        self._hang.remove_empty()
        if self._rendezvous_folder is not None:
            shutil.rmtree(self._rendezvous_folder, ignore_errors=True)
        if self._folder_lock is not None:
            self._folder_lock.release()

    def result(self) -> AttemptResult:
        """Result of the attempt; call after `poll` returned True."""
        if self._failures:
            hang = self._hang.report_hang()
            return attempt_end.hung(hang) if hang is not None else attempt_end.failed(self._failures.values())
        codes = [record.exit for record in self._records.values() if record.exit is not None]
        if len(codes) == self.world_size:
            return attempt_end.ended(codes, self.folder.stop_reason())
        text = attempt_end.tail(self.logs / "controller.log")
        return AttemptResult("failed", 1, "the parent process of the ranks (submitit's controller) died", text)

    def _over(self) -> bool:
        assert self._job is not None
        return self._job.poll() is not None

    def _find_processes(self) -> None:
        if self._controller is None or len(self._processes) == self.world_size:
            return
        known = {process.pid for process in self._processes.values()}
        with contextlib.suppress(psutil.Error):
            for child in self._controller.children():
                number = None
                if child.pid not in known:
                    with contextlib.suppress(psutil.Error):  # its environment may be unreadable
                        number = child.environ().get("SUBMITIT_LOCAL_GLOBALID")
                if number is not None:
                    self._processes[int(number)] = child
                    self._first_seen = self._first_seen or time.monotonic()

    def _update(self, rank: int, over: bool) -> None:
        """Update one rank. Liveness is read before the record, which a rank writes before it exits."""
        if rank in self._failures or self._has_ended(rank):
            return
        now, alive = time.time(), self._is_alive(rank)
        record = rank_env.read_record(self.folder, self.attempt, rank, self._rendezvous_folder)
        if record is not None:
            self._records[rank] = record
        if record is not None and record.end is not None:
            if record.failed:
                self._failures[rank] = attempt_end.failure_from_error(record)
        elif alive or self._killed:
            self._last_seen[rank] = now
        elif rank in self._processes or over or (record is not None and not _runs(record.pid)):
            # The rank exited, or the controller exited before starting it.
            seen, log = self._last_seen.get(rank, now), self.log(rank)
            oom = count_oom_kills() > self._oom_kills
            if record is None:
                self._failures[rank] = attempt_end.failure_at_start(rank, seen, log)
            else:
                self._failures[rank] = attempt_end.failure_from_signal(rank, seen, log, out_of_memory=oom)
        elif record is None and _is_past(self._first_seen, START_LIMIT):
            self._failures[rank] = attempt_end.failure_at_start(rank, now, self.log(rank))

    def _has_ended(self, rank: int) -> bool:
        record = self._records.get(rank)
        return record is not None and record.end is not None

    def _any_alive(self) -> bool:
        return any(self._is_alive(rank) for rank in self._processes)

    def _is_alive(self, rank: int) -> bool:
        try:
            process = self._processes.get(rank)
            return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def _runs(pid: int) -> bool:
    """True unless the process is gone; a rank that is killed at once may never have been seen among the children."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _is_past(since: float | None, seconds: float) -> bool:
    return since is not None and time.monotonic() - since > seconds


def _kill_trees(roots: Iterable[psutil.Process]) -> None:
    victims: list[psutil.Process] = []
    for process in roots:
        with contextlib.suppress(psutil.Error):
            victims += [*process.children(recursive=True), process]
    for process in victims:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(victims, timeout=GRACE)


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Redirect the output of processes started in the block, so that they do not keep the launcher's pipe open."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield
    finally:
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for descriptor in (*kept, target):
            os.close(descriptor)


POLL_INTERVAL = 0.05


def run_on_ranks(main: str, experiment: Experiment, request: Any) -> Any:
    """Call `main`, an import path, on all ranks of an experiment's layout with a JSON value; returns that of rank 0.

    Raises UserError if a rank raised one, RuntimeError if one failed otherwise, and KeyboardInterrupt after a signal.
    """
    from titan_exp.trainer.distributed import REQUEST, RESPONSE

    with files.temporary_folder() as scratch:
        folder = RunFolder(scratch)
        write_atomically(folder.config, to_yaml(experiment), durable=False)
        write_atomically(folder.path / REQUEST, json.dumps(request), durable=False)
        layout = ResolvedLayout.of(experiment)
        attempt = folder.add_attempt(world_size=layout.world_size, hosts=[socket.gethostname()]).attempt
        folder.write_state(RunState("running", 0, time.time(), attempt, None))
        ranks = LocalRanks(layout, folder, attempt)
        with rank_env.environment({RANK_MAIN: main}), Interrupts() as interrupts:
            try:
                ranks.start()
                while not ranks.poll():
                    if interrupts.first is not None:
                        raise KeyboardInterrupt
                    time.sleep(POLL_INTERVAL)
                result = ranks.result()
            finally:
                ranks.close()
        if result.exit_code == UserError.exit_code:
            raise UserError(result.detail.strip())
        if result.exit_code:
            raise RuntimeError(f"{result.detail.strip()}\n{result.reason}")
        return json.loads((folder.path / RESPONSE).read_text(encoding="utf-8"))


def submitit_rank() -> rank_env.RankInfo:
    """Rank from submitit's environment. Restores the launcher's CUDA_VISIBLE_DEVICES and sys.path."""
    rank_env.extend_import_path()
    gpus = os.environ.get(rank_env.VISIBLE_GPUS)
    if gpus is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    return rank_env.RankInfo(
        rank=int(os.environ["SUBMITIT_LOCAL_GLOBALID"]),
        world_size=int(os.environ["SUBMITIT_LOCAL_NTASKS"]),
        local_rank=int(os.environ["SUBMITIT_LOCAL_LOCALID"]),
        attempt=int(os.environ[rank_env.ATTEMPT]),
        launcher=int(os.environ[rank_env.LAUNCHER]),
        controller=int(os.environ["SUBMITIT_LOCAL_JOB_ID"]),
    )


def run_submitit_rank(path: str) -> None:
    """Run one rank of the run folder at `path`; calls `sys.exit` with a nonzero exit code."""
    world = World.from_environment()
    folder = RunFolder(path, world_logs=None if world is None else world.logs)
    if code := run_rank(Run(folder), submitit_rank()):
        sys.exit(code)


if __name__ == "__main__":
    run_submitit_rank(sys.argv[1])
