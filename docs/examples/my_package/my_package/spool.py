"""A batch queue: a folder of shell scripts, which a worker runs one after the other."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Interval

from titan_exp.launch.executor import JobStatus
from titan_exp.launch.remote import Job, QueueExecutor


class SpoolExecutor(QueueExecutor):
    """Queues runs in a folder, where the suffix of a job's file is its state."""

    @dataclass(frozen=True)
    class Options:
        """Keys of `cluster.options`."""

        folder: str
        """Absolute path. One worker empties it: `python -m my_package.spool FOLDER`."""
        priority: Annotated[int, Interval(ge=0, le=99)] = 50
        """The smallest number starts first."""

    def enqueue(self, options: Options, job: Job) -> str:
        """The id of a job sorts by priority, then by age."""
        job_id = f"{options.priority:02}-{time.time_ns()}-{job.token}"
        script = Path(options.folder) / f"{job_id}.new"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"# {job.name}\nexec {job.command()}\n")
        script.rename(script.with_suffix(".queued"))
        return job_id

    def jobs(self, options: Options, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        """A job that is started meanwhile is found as running."""
        found = {}
        for job_id in ids:
            for state in ("queued", "running"):
                if (Path(options.folder) / f"{job_id}.{state}").exists():
                    found[job_id] = JobStatus(state)
        return found

    def dequeue(self, options: Options, job_id: str) -> bool:
        """The file is gone if the worker was faster."""
        try:
            (Path(options.folder) / f"{job_id}.queued").unlink()
        except FileNotFoundError:
            return False
        return True


def work(folder: Path) -> None:
    """Run one job after the other, for ever."""
    while True:
        for job in sorted(folder.glob("*.queued"))[:1]:
            with contextlib.suppress(FileNotFoundError):  # taken out of the queue
                running = job.rename(job.with_suffix(".running"))
                subprocess.run(["sh", running], check=False)
                running.rename(job.with_suffix(".ended"))
        time.sleep(0.5)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
