"""sbatch submission of a job or job array through submitit: a script with a path, without pickles.

Before sbatch is called, each run's attempts.jsonl gets the intent, with a token that the job's comment has, too. After
a crash in between, the token shows whether a job exists.
"""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from titan_exp.launch.code_snapshot import CodeSnapshot
from titan_exp.launch.rank.rank_env import environment, outer_launch
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.slurm.script import Resources, Script, render, sbatch_options
from titan_exp.launch.slurm.squeue import explain_refusal, in_a_sentence
from titan_exp.rules.cluster import RESERVED, long_name
from titan_exp.tracking.run_folder.files import is_held
from titan_exp.tracking.run_folder.run_folder import write_atomically

Item = TypeVar("Item")
Result = TypeVar("Result")

WAITING = 16


def thread_map(do: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Apply `do`, which shares no state, to each item in threads; returns results in order. Raises the first error."""
    with ThreadPoolExecutor(WAITING) as pool:
        return list(pool.map(do, items))


ARRAY_LIMIT = 1000  # runs per array; SLURM's MaxArraySize is 1001 by default
VARIABLES = {
    "time": ("TIMELIMIT",),
    "mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "array": ("ARRAY_INX",),
    "gpus-per-node": ("GPUS_PER_NODE", "GPUS", "GPUS_PER_TASK", "GRES"),
    "cpus-per-task": ("CPUS_PER_TASK", "CPUS_PER_GPU"),
    "requeue": ("REQUEUE", "NO_REQUEUE"),
    "no-requeue": ("REQUEUE", "NO_REQUEUE"),
}
"""Variables SBATCH_* that override or exclude a script's option and are not named after it."""
GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""Variables that hide GPUs of the submitting machine, or of the job that submits."""
SBATCH_LIMIT = 120  # timeout of sbatch in seconds; it blocks while the controller is down
TIMED_OUT = 124  # exit code of `timeout` when the time is up


class SbatchError(Exception):
    """sbatch failed, timed out, or printed no job id. A job may exist, so SLURM is then asked for the token."""

    def __init__(self, sentence: str, refusal: str = "") -> None:
        super().__init__(sentence)
        self.refusal = refusal
        """Lines for the user if sbatch failed; a job still exists if only the connection broke afterwards."""


def resources_of(plan: RunPlan) -> Resources:
    """Nodes and tasks of a run."""
    layout = plan.layout
    return Resources(layout.cluster, layout.nodes, min(layout.world_size, layout.node_size))


def group_by_resources(plans: Sequence[RunPlan]) -> list[list[RunPlan]]:
    """Group runs by equal resources, at most `ARRAY_LIMIT` per group, in order."""
    groups: dict[str, list[RunPlan]] = {}
    for plan in plans:
        # The worlds of one run have an array of their own.
        alone = plan.run_id if plan.layout.cluster.worlds > 1 else ""
        groups.setdefault(alone + repr(resources_of(plan)), []).append(plan)
    return [
        group[first : first + ARRAY_LIMIT] for group in groups.values() for first in range(0, len(group), ARRAY_LIMIT)
    ]


class Batch:
    """Job of one run, or job array of several runs with equal resources; by default of all worlds, with a new token.

    The run folders must exist, and the caller must hold the submission lock.
    """

    def __init__(
        self, runs: Path, plans: Sequence[RunPlan], snapshot: CodeSnapshot, token: str = "", worlds: Sequence[int] = ()
    ) -> None:
        self.plans = plans
        count = plans[0].layout.cluster.worlds
        self._worlds = tuple(worlds or range(count)) if count > 1 else None
        self.token = token or uuid.uuid4().hex[:12]
        self.folder = submissions_folder(runs) / self.token
        """Submission folder; entries 0, 1, ... link to the run folders of an array."""
        single, first = len(plans) == 1, plans[0]
        self._script = Script(
            name=first.job_name if single else first.experiment.experiment.name,
            token=self.token,
            resources=resources_of(first),
            snapshot=snapshot,
            python=sys.executable,
            import_path=snapshot.import_path(),
            folder=str(first.folder.path if single else self.folder),
            submission=str(self.folder),
            runs=str(runs),
            array=None if single else len(plans),
            worlds=self._worlds,
        )

    @property
    def text(self) -> str:
        """The batch script."""
        return render(self._script)

    def token_of(self, index: int) -> str:
        """Token of a run, with the task index in an array."""
        return self.token if len(self.plans) == 1 else f"{self.token}_{index}"

    def prepare(self) -> None:
        """Write a batch script per run, and the links from array index to run folder."""
        self.folder.mkdir(0o755, exist_ok=True)
        for index, plan in enumerate(self.plans):
            folder, link = plan.folder, self.folder / str(index)
            folder.logs.mkdir(exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(folder.path, target_is_directory=True)
            single = replace(
                self._script,
                name=plan.job_name,
                token=self.token_of(index),
                folder=str(folder.path),
                array=None,
                worlds=self._worlds and tuple(range(plan.layout.cluster.worlds)),
            )
            write_atomically(folder.path / "job.sh", render(single), durable=False)

    def record_intent(self) -> list[int]:
        """Add an attempt to every run; returns the attempt numbers."""

        def record(index: int) -> int:
            plan, token = self.plans[index], self.token_of(index)
            kind, size = plan.experiment.cluster.kind, plan.layout.devices
            return plan.folder.add_attempt(world_size=size, hosts=(), launched_by=kind, token=token).attempt

        return thread_map(record, range(len(self.plans)))

    def submit(self) -> list[str]:
        """Call sbatch; returns the job id of each run. Raises SbatchError."""
        script, lock = self.folder / "job.sh", str(self.folder / "sbatch.lock")
        write_atomically(script, self.text, durable=False)
        # flock holds the lock while sbatch runs, even if this process is killed.
        command = ["flock", lock, "timeout", str(SBATCH_LIMIT), "sbatch", str(script)]
        try:
            with (
                tempfile.TemporaryDirectory() as folder,
                contextlib.redirect_stderr(io.StringIO()),
                environment(_without_outer_jobs(self._script)),
            ):
                job = _Executor(Path(folder), self.text, command).submit_script()
        except FailedJobError as error:
            ended = error.__cause__
            if not isinstance(ended, subprocess.CalledProcessError):
                raise SbatchError("we cannot read what sbatch printed") from None
            if ended.returncode == TIMED_OUT:
                raise SbatchError(f"sbatch did not answer within {SBATCH_LIMIT} s") from None
            said = str(error) or f"sbatch ended with exit code {ended.returncode}"
            ours = ("job-name", "comment", "signal", "requeue", "no-requeue", "open-mode", "output")
            options = {option: value for option, value in sbatch_options(self._script) if option not in ours}
            asked = [f"--{option}={value}" for option, value in options.items() if value is not None]
            asked += self._script.resources.cluster.sbatch_args
            raise SbatchError(in_a_sentence(said), explain_refusal(said, asked)) from None
        except FailedSubmissionError as error:
            printed = str(error).partition('"')[2].rpartition('"')[0]
            raise SbatchError(f"sbatch printed no job id: {printed[:200]!r}") from None
        return [job] if len(self.plans) == 1 else [f"{job}_{index}" for index in range(len(self.plans))]


class _Executor(SlurmExecutor):
    """submitit's SlurmExecutor with our batch script and command, without pickles. Its folder is temporary, because in
    your path it would replace `%j` and `%t`."""

    def __init__(self, folder: Path, text: str, command: list[str]) -> None:
        super().__init__(folder)
        self._text, self._sbatch = text, command

    def submit_script(self) -> str:
        """Call sbatch; returns the job id."""
        return str(self._submit_command("").job_id)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._text

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return self._sbatch


def submissions_folder(runs: Path) -> Path:
    """Folder of this user's submissions inside a folder of runs, which users may share: SLURM runs what is in it."""
    return runs / f".slurm-{os.geteuid()}"


def is_being_submitted(runs: Path, token: str) -> bool:
    """True if the submission's sbatch is still running."""
    return any(is_held(folder / token.partition("_")[0] / "sbatch.lock") for folder in runs.glob(".slurm-*"))


def _without_outer_jobs(script: Script) -> dict[str, str | None]:
    """Environment changes that unset variables of a job or launch around this process, and SBATCH_* variables that
    would override an option of the script; others are defaults of the site or the user, and stay."""
    keep = {"SLURM_CONF", "SLURM_CLUSTERS"}
    options = [option for option, value in sbatch_options(script) if value is not None]
    options += [*RESERVED, "array", *map(long_name, script.resources.cluster.sbatch_args)]
    # A script without an array must not become one.
    ours = {
        f"SBATCH_{variable}"
        for option in options
        for variable in VARIABLES.get(option, (option.upper().replace("-", "_"),))
    }
    if "gpu" not in os.environ.get("SBATCH_GRES", ""):
        ours.discard("SBATCH_GRES")  # a default for other resources
    outer = [name for name in os.environ if name.startswith("SLURM_") and name not in keep]
    outer += [name for name in os.environ if name in ours or name in GPUS]
    return {**outer_launch(), **dict.fromkeys(outer)}
