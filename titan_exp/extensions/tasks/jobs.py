"""Jobs beside training: each scores the tasks by one checkpoint, on this machine or in SLURM.

`tasks/requests/step-N.json` in the run folder asks for a job, and is there until the tasks are scored. A job holds the
lock beside it until it ends, however it ends. So a request without a job that is alive is to be started, or has failed.
"""

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from titan_exp.checkpoint.retention import CheckpointFolder
from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.run import SLURM, ClusterConfig
from titan_exp.config.schema.typed_config import load_group
from titan_exp.extensions.tasks.scores import FOLDER, evaluation_file, metrics_of, write_evaluation
from titan_exp.extensions.tasks.tasks import job_cluster
from titan_exp.launch.executor import typed_path
from titan_exp.launch.rank.rank_env import extend_import_path, outer_launch
from titan_exp.launch.slurm.script import MARK, Resources, resource_options
from titan_exp.launch.slurm.squeue import UnreachableError, in_a_sentence, listed_jobs
from titan_exp.tracking.run_folder.files import PREFIX, FileLock, LockedError, is_held, mkdir_below, write_atomically
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.tracking.run_folder.run_folder import RunFolder, read_json

HERE = "titan_exp.extensions.tasks.jobs"
ROWS = "tasks.jsonl"  # file of a run with the metrics of each job, a row for each step
SBATCH_SECONDS = 60  # timeout of sbatch, for which training waits
HELD = "held"  # argument of a job that inherits its lock


@dataclass(frozen=True)
class Request:
    """Content of a request."""

    step: int
    tokens: int  # tokens trained on until then
    paths: tuple[str, ...]  # absolute paths of the tasks
    most: int | None  # largest number of items of each task
    digests: dict[str, str]  # version of each task by its name
    devices: int  # number of devices of the job


class Jobs:
    """Requests and results of a run."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.rows = folder, folder.path / ROWS
        self._requests = folder.path / FOLDER / "requests"
        self._checkpoints = CheckpointFolder(folder.checkpoints)

    def log(self, step: int) -> Path:
        """Log of a step's job, which all of its starts share."""
        return self._file(step, "log")

    def open_steps(self) -> list[int]:
        """Steps whose tasks are to be scored, ascending."""
        names = (path.stem.removeprefix("step-") for path in self._requests.glob("step-*.json"))
        return sorted(int(name) for name in names if name.isdecimal())

    def ask(self, request: Request) -> None:
        """Request a job, unless its tasks are scored, and keep the checkpoint until then."""
        if not self._is_scored(request):
            mkdir_below(self.folder.path, self._requests)
            mkdir_below(self.folder.path, self._checkpoints.path)
            self._checkpoints.keep_file(request.step).touch()
            write_atomically(self._file(request.step, "json"), f"{json.dumps(asdict(request))}\n")

    def can_start(self, step: int) -> bool:
        """True if the checkpoint is complete."""
        return self._checkpoints.path_of(step).is_dir()

    def waiting(self, kind: str) -> list[int]:
        """Open steps that no live job of executor `kind` will score."""
        found = [step for step in self.open_steps() if not is_held(self._file(step, "lock"))]
        if found and kind == SLURM:
            try:
                jobs = {job.token for job in listed_jobs([os.geteuid()]) if job.phase != "gone"}
            except UnreachableError:
                return []  # unknown
            found = [step for step in found if self._token(step) not in jobs]
        return [step for step in found if self._file(step, "json").exists()]  # a job may just have ended

    def start(self, step: int, cluster: ClusterConfig, devices: int) -> None:
        """Start the job of a request; it outlives this process. Raises OSError, SubprocessError or LockedError."""
        command = [sys.executable, "-m", HERE, str(self.folder.path.absolute()), str(step)]
        if cluster.kind == SLURM:
            self._submit(step, cluster, devices, command)
            return
        with FileLock(self._file(step, "lock")) as lock, self.log(step).open("ab") as log:
            lock.acquire(f"job of step {step}", timeout=0.5)
            # The shell ends at once, since descendants of a rank are killed with it.
            shell = ["sh", "-c", '"$@" &', "sh", *command, HELD]
            fds, quiet = [lock.fileno()], subprocess.DEVNULL
            subprocess.run(shell, env=_environment(cluster), pass_fds=fds, start_new_session=True, check=True,
                           stdin=quiet, stdout=log, stderr=log, timeout=SBATCH_SECONDS)  # fmt: skip

    def score(self, step: int, *, trust: bool = False, held: bool = False) -> Path | None:
        """Score the tasks of a request, and let its checkpoint go; returns the result, None if nothing was asked for.
        With `held` this process has the request's lock, and waits for its turn. Raises LockedError if a job has it."""
        with FileLock(self._file(step, "lock")) as lock, FileLock(self._requests / ".turn.lock") as turn:
            if held:
                turn.acquire(timeout=math.inf)
            else:
                lock.acquire(f"job of step {step}", timeout=1)
            request = read_json(self._file(step, "json"), Request)
            if request is None:
                return None
            if not self._is_scored(request):
                self._write(request, trust=trust)
            self._add_row(step)
            self._checkpoints.keep_file(step).unlink(missing_ok=True)
            self._file(step, "json").unlink()
            if not self.folder.ranks_alive():  # else training deletes the checkpoint
                config = load_group(self.folder.config, "checkpoint", trust=trust)
                with suppress(OSError):
                    self._checkpoints.apply_retention(config.keep, config.keep_every)
            return evaluation_file(self.folder.path, step)

    def _file(self, step: int, kind: str) -> Path:
        return self._requests / f"step-{step:08d}.{kind}"

    def _token(self, step: int) -> str:
        return f"tasks-{sha256(str(self.folder.path.absolute()).encode()).hexdigest()[:12]}-{step}"

    def _is_scored(self, request: Request) -> bool:
        with suppress(UserError, LookupError, TypeError, AttributeError):  # a damaged result counts as none
            found = read_json(evaluation_file(self.folder.path, request.step)) or {}
            return {name: one["digest"] for name, one in found["tasks"].items()} == request.digests
        return False

    def _write(self, request: Request, *, trust: bool) -> None:
        from titan_exp.extensions.tasks.checkpoint_scores import score_checkpoint

        asked = {"tasks": request.paths, "most": request.most, "trust": trust, "averaged": False, "lm_eval": False}
        precision = load_group(self.folder.config, "training", ()).mixed_precision
        words = [f"parallelism.dp_shard={request.devices}", f"training.mixed_precision={precision}"]
        found = score_checkpoint(self.folder.path, words, asked, step=request.step)["tasks"]
        write_evaluation(self.folder.path, found, step=request.step, tokens=request.tokens)

    def _add_row(self, step: int) -> None:
        found: dict[str, Any] = read_json(evaluation_file(self.folder.path, step))
        row = {"step": step, "tokens": found["tokens"], **metrics_of(found["tasks"])}
        with FileLock(self._requests / ".rows.lock") as lock:
            lock.acquire(timeout=60)
            rows = {one["step"]: one for one in read_metrics(self.rows)} | {step: row}
            write_atomically(self.rows, "".join(f"{json.dumps(rows[one])}\n" for one in sorted(rows)))

    def _submit(self, step: int, cluster: ClusterConfig, devices: int, command: Sequence[str]) -> None:
        options = dict(resource_options(Resources(cluster, 1, devices))) | {
            "job-name": f"tasks-{self.folder.path.name}-{step}",
            "comment": " ".join(filter(None, [cluster.comment, f"{MARK}{self._token(step)}"])),
            "output": str(self.log(step).absolute()).replace("%", "%%"),
            "open-mode": "append",
            "export": "ALL",
            "wrap": "\n".join([*cluster.setup, f"exec {shlex.join(command)}"]),
        }
        words = [f"--{name}={value}" for name, value in options.items() if value is not None]
        done = subprocess.run(["sbatch", "--parsable", *words, *cluster.sbatch_args], env=_environment(cluster),
                              capture_output=True, text=True, timeout=SBATCH_SECONDS, check=False)  # fmt: skip
        if done.returncode:
            raise OSError(in_a_sentence(done.stderr) or f"sbatch ended with exit code {done.returncode}")


def _environment(cluster: ClusterConfig) -> dict[str, str]:
    """Environment of a job: this rank's without its place in the run, and with its import path."""
    ours, others = outer_launch(), ("SLURM", "SRUN_", "PMI", "SUBMITIT_")
    found = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and (not name.startswith(others) or name in ("SLURM_CONF", "SLURM_CLUSTERS"))
    }
    if PREFIX in found.get("TMPDIR", ""):  # removed with the attempt
        del found["TMPDIR"]
    if device_type(cluster) == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
    elif cluster.kind == SLURM:
        found.pop("CUDA_VISIBLE_DEVICES", None)
    if cluster.threads_per_process is not None:
        found["OMP_NUM_THREADS"] = str(cluster.threads_per_process)
    return {**found, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path))), **cluster.environment}


def retry(path: Path, *, trust: bool = False) -> int:
    """Score what the jobs of a run failed to score, in this process. Raises UserError if nothing waits."""
    jobs = Jobs(RunFolder(path))
    if not (steps := jobs.open_steps()):
        reason = "has no request for scores of tasks"
        raise UserError(f"{path} {reason}. Give the tasks: titan-exp evaluate {path} --tasks PATH")
    for step in steps:
        try:
            found = jobs.score(step, trust=trust)
            print(f"step {step}: {'scored by its job' if found is None else found}")
        except LockedError:
            print(f"step {step}: its job is at work; its log is {jobs.log(step)}")
    return 0


def report(experiment: Experiment, folder: Path) -> Iterator[str]:
    """Lines about the jobs that have not scored their tasks."""
    jobs = Jobs(RunFolder(folder))
    waiting = jobs.waiting(job_cluster(experiment).kind)
    for step in jobs.open_steps():
        state = "not scored" if step in waiting else "a job scores them"
        yield f"tasks of step {step}: {state}; its log is {typed_path(jobs.log(step))}"
    if waiting:
        yield f"  titan-exp evaluate {typed_path(folder)} --tasks"


def main(path: str, step: str, *held: str) -> int:
    """Entry point of a job; returns the exit code."""
    extend_import_path()
    try:
        found = Jobs(RunFolder(path)).score(int(step), held=bool(held))
        print(f"step {step}: {found or 'scored already'}", flush=True)
    except LockedError:
        print(f"step {step}: another job is at work", flush=True)
    except UserError as error:
        print(error, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
