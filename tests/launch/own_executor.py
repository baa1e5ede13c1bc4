"""A user's executor: detached rank processes that meet at a port which rank 0 writes into the attempt's logs."""

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.launch.executor import Executor, JobStatus, Submission, SubmitOptions
from titan_exp.launch.rank.rank_env import TOKEN, RankInfo
from titan_exp.launch.run_plan import RunPlan, create_run_folder
from titan_exp.tracking.run_folder.run_folder import RunFolder

STARTED: list["subprocess.Popen[bytes]"] = []
"""Processes of this submitter, which a test waits for."""


class DetachedExecutor(Executor):
    """Starts all ranks of a run and returns. The job id is the token; the ranks' pids are in the attempt's logs."""

    def submit(self, plans: Sequence[RunPlan], options: SubmitOptions) -> list[Submission]:
        return [self._start(plan) for plan in plans]

    def _start(self, plan: RunPlan) -> Submission:
        create_run_folder(plan)
        size, token = ResolvedLayout.of(plan.experiment).world_size, uuid.uuid4().hex
        row = plan.folder.add_attempt(world_size=size, hosts=(), launched_by=self.kind, token=token, job_id=token)
        logs = plan.folder.attempt_logs(row.attempt)
        logs.mkdir(parents=True)
        command = [sys.executable, "-m", "titan_exp.launch.rank.main", str(plan.folder.path)]
        pids = []
        for rank in range(size):
            environment = {**os.environ, TOKEN: token, "DETACHED_RANK": str(rank), "DETACHED_SIZE": str(size)}
            with (logs / f"rank-{rank:05d}.log").open("w") as log:
                STARTED.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            pids.append(STARTED[-1].pid)
        (logs / "pids").write_text(" ".join(map(str, pids)))
        return Submission(plan, "submitted", token)

    def status(self, folders: Sequence[RunFolder]) -> Mapping[Path, JobStatus]:
        return {folder.path: self._status(folder) for folder in folders}

    def _status(self, folder: RunFolder) -> JobStatus:
        attempt = folder.read_attempts()[-1]
        alive = [
            pid for pid in map(int, (folder.attempt_logs(attempt.attempt) / "pids").read_text().split()) if lives(pid)
        ]
        return JobStatus("running" if alive else "gone", attempt.token)

    def rank_info(self) -> RankInfo | None:
        if "DETACHED_RANK" not in os.environ:
            return None
        rank = int(os.environ["DETACHED_RANK"])
        return RankInfo(rank, int(os.environ["DETACHED_SIZE"]), rank, hosts=(socket.gethostname(),))

    def publish_rendezvous(self, folder: RunFolder, rank: RankInfo) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            (self._logs(folder, rank) / "port").write_text(str(free.getsockname()[1]))

    def join_rendezvous(self, folder: RunFolder, rank: RankInfo) -> None:
        path = self._logs(folder, rank) / "port"
        while not path.exists():
            time.sleep(0.05)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=path.read_text())

    def _logs(self, folder: RunFolder, rank: RankInfo) -> Path:
        assert rank.attempt is not None
        return folder.attempt_logs(rank.attempt)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
