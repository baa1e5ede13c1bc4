"""One submission: a folder that says which runs it holds, the batch script, and sbatch through submitit.

The intent stands in every run's attempts.jsonl before sbatch is called, with a token that the job carries as well. So
whatever dies in between, the job is found, and there is none where none was made.
"""

import contextlib
import io
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor

from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.launch.provenance.code_snapshot import CodeSnapshot
from titan_exp.launch.rank.child_env import environment
from titan_exp.launch.run_plan import RunPlan
from titan_exp.launch.slurm.script import Resources, Script, render
from titan_exp.launch.state.thread_map import thread_map
from titan_exp.tracking.run_folder.file_lock import is_held
from titan_exp.tracking.run_folder.run_folder import write_atomically

FOLDER = ".slurm"
"""Folder of the submissions, beside the runs."""
ARRAY_LIMIT = 1000
"""Runs of one array; SLURM's MaxArraySize is 1001 unless a site says otherwise."""
SBATCH_LIMIT = 120
"""Seconds that sbatch has; it waits for a controller that is down."""


class RejectedError(Exception):
    """sbatch made no job; its own words."""


class UncertainError(Exception):
    """Nobody knows whether sbatch made a job; the next submission asks SLURM."""


def resources_of(plan: RunPlan) -> Resources:
    """What a run asks for."""
    layout = ResolvedLayout.of(plan.experiment)
    return Resources(layout.cluster, layout.nodes, min(layout.world_size, layout.node_size))


def grouped(plans: Sequence[RunPlan]) -> list[list[RunPlan]]:
    """Runs that ask for the same, in the order in which they were named."""
    groups: dict[str, list[RunPlan]] = {}
    for plan in plans:
        groups.setdefault(repr(resources_of(plan)), []).append(plan)
    return [
        group[first : first + ARRAY_LIMIT] for group in groups.values() for first in range(0, len(group), ARRAY_LIMIT)
    ]


class Batch:
    """Runs that ask for the same resources: a job or, where there are several, an array.

    Args:
        runs: the folder of all runs.
        plans: the runs; their folders are there and claimed by the caller.
        frozen: the code that they run.
    """

    def __init__(self, runs: Path, plans: Sequence[RunPlan], frozen: CodeSnapshot) -> None:
        self.plans = plans
        self.token = uuid.uuid4().hex[:12]
        """By which the job is found."""
        self.folder = runs / FOLDER / self.token
        """What is known of the submission; the entries 0, 1, ... lead to the run folders of an array."""
        single = len(plans) == 1
        first = plans[0]
        self._script = Script(
            name=_job_name(first) if single else first.experiment.experiment.name,
            token=self.token,
            resources=resources_of(first),
            frozen=frozen,
            python=sys.executable,
            import_path=_import_path(frozen),
            folder=str(first.folder.path if single else self.folder),
            runs=str(runs),
            array=None if single else len(plans),
        )

    def token_of(self, index: int) -> str:
        """The token of a run."""
        return self.token if len(self.plans) == 1 else f"{self.token}_{index}"

    def prepare(self) -> None:
        """Write everything but the intent: every run's own script, and the way from an array's index to a run."""
        self.folder.mkdir(parents=True)
        for index, plan in enumerate(self.plans):
            folder = plan.folder
            folder.logs.mkdir(exist_ok=True)
            (self.folder / str(index)).symlink_to(folder.path, target_is_directory=True)
            own = replace(
                self._script,
                name=_job_name(plan),
                token=self.token_of(index),
                folder=str(folder.path),
                array=None,
            )
            write_atomically(folder.path / "job.sh", render(own), durable=False)

    def intend(self) -> list[int]:
        """Write down in every run that it is about to be submitted; returns the numbers of the attempts."""

        def intend(index: int) -> int:
            plan = self.plans[index]
            return plan.folder.add_attempt(
                world_size=ResolvedLayout.of(plan.experiment).world_size,
                hosts=(),
                launched_by="slurm",
                token=self.token_of(index),
            ).attempt

        return thread_map(intend, range(len(self.plans)))

    def submit(self) -> list[str]:
        """Call sbatch; returns the job number of each run.

        Raises:
            RejectedError: there is no job.
            UncertainError: sbatch did not answer in time.
        """
        said = io.StringIO()
        executor = _Executor(self.folder, render(self._script))
        try:
            with contextlib.redirect_stderr(said), environment(_of_a_job()):
                job = executor.submit_script()
        except FailedJobError as error:
            words = " ".join(str(error).replace("sbatch: error: ", "").split())
            if not words:
                raise UncertainError(f"sbatch did not answer within {SBATCH_LIMIT} s") from None
            raise RejectedError(words) from None
        return [job] if len(self.plans) == 1 else [f"{job}_{index}" for index in range(len(self.plans))]


def is_being_submitted(runs: Path, token: str) -> bool:
    """Whether the sbatch of a submission still runs, although whoever called it is gone."""
    return is_held(runs / FOLDER / token.partition("_")[0] / "sbatch.lock")


class _Executor(SlurmExecutor):
    """submitit's executor with a batch script of our own: what it submits is a path, and nothing is pickled."""

    def __init__(self, folder: Path, text: str) -> None:
        super().__init__(folder)
        self._text = text

    def submit_script(self) -> str:
        """Call sbatch; returns the job's number."""
        return str(self._submit_command("").job_id)

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._text

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # The lock lives as long as sbatch does, even where this process is killed meanwhile.
        lock = str(self.folder / "sbatch.lock")
        return ["flock", lock, "timeout", str(SBATCH_LIMIT), "sbatch", str(submission_file_path)]


def _job_name(plan: RunPlan) -> str:
    return f"{plan.experiment.experiment.name}-{plan.run_id}"


def _import_path(frozen: CodeSnapshot) -> list[str]:
    """Where this process finds packages, beyond its own installation; a copy of the current folder takes its place."""
    here, own = os.getcwd(), (sys.prefix, sys.base_prefix)
    places = dict.fromkeys(os.path.abspath(entry) for entry in [*sys.path, here])
    added = [place for place in places if not place.startswith(own)]
    return [frozen.own if place == here and frozen.own is not None else place for place in added]


def _of_a_job() -> dict[str, str | None]:
    """What a job around this process would say to sbatch, taken out."""
    kept = {"SLURM_CONF", "SLURM_CLUSTERS"}
    return {name: None for name in os.environ if name.startswith("SLURM_") and name not in kept}
