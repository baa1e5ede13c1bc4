"""Scores of tasks with every evaluation of training, in it or in jobs beside it, and of a checkpoint."""

import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import torch.distributed as dist

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.run import SLURM
from titan_exp.data.tokenizers import build_tokenizer
from titan_exp.extensions.tasks.encoding import encode
from titan_exp.extensions.tasks.jobs import Jobs, Request
from titan_exp.extensions.tasks.scorer import Scorer, scores_of
from titan_exp.extensions.tasks.scores import metrics_of, values_of, write_evaluation
from titan_exp.extensions.tasks.tasks import job_cluster, tasks_of
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.files import LockedError
from titan_exp.tracking.run_folder.metrics_jsonl import read_metrics
from titan_exp.trainer.part import Part, Phase, Run, Step
from titan_exp.trainer.train_state import TrainState

LOOK_SECONDS, SLURM_SECONDS = 2.0, 30.0
"""Seconds between looks for jobs that are to be started, or have ended: on this machine, and in SLURM."""


def parts(experiment: Experiment, state: TrainState) -> Iterator[Part]:
    """Part of a run with tasks."""
    evaluation: Any = experiment.evaluation
    yield Tasks(experiment, state) if evaluation.where == "training" else TaskJobs(experiment)


class Tasks(Part):
    """Scores of tasks after each evaluation."""

    name = "tasks"
    prefix = "tasks/"

    def __init__(self, experiment: Experiment, state: TrainState) -> None:
        self._experiment = experiment
        self._scorer = Scorer(state.model, state.mesh, experiment)

    def begin(self, run: Run) -> None:
        """Read the tasks, and say what is not scored."""
        self._folder, self._writes = run.folder, run.report.writes
        tokenizer = build_tokenizer(self._experiment.data)
        self._tasks = [encode(one, tokenizer, self._experiment.training.seq_len) for one in tasks_of(self._experiment)]
        for one in self._tasks:
            if one.refused or one.truncated:
                text = "task %s: %d of its items are not scored, and %d contexts are cut"
                get_logger().warning(text, one.task.name, len(one.refused), one.truncated)

    def due(self, step: int, *, last: bool) -> bool:
        """True with each evaluation."""
        return last or self._experiment.evaluation.due(self._experiment.training, step)

    def after(self, step: Step) -> dict[str, float | int | None] | None:
        """Metrics of all tasks; those of their items lie in the run folder."""
        if not step.agreed or not self.due(step.step, last=step.last):
            return None
        found = values_of(scores_of(self._scorer, self._tasks))
        if self._writes and dist.get_rank() == 0:
            write_evaluation(self._folder.path, found, step=step.step, tokens=step.tokens)
        return {**metrics_of(found)}


class TaskJobs(Part):
    """Jobs that score tasks, each by the checkpoint of an evaluation."""

    name = "task_jobs"
    phase = Phase.DECIDE
    isolated = False  # it runs no module

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._keys: Any = experiment.evaluation
        self._cluster = job_cluster(experiment)
        self._looks_at, self._logged = 0.0, False
        # Steps whose job was started, is named as failed, or has its row handed on.
        self._started, self._named, self._handed = set[int](), set[int](), set[int]()

    def begin(self, run: Run) -> None:
        """Read the tasks' versions."""
        self._report, self._jobs = run.report, Jobs(run.folder)
        self._digests = {task.name: task.digest for task in tasks_of(self._experiment)}

    def after(self, step: Step) -> None:
        """Ask for a checkpoint and its job; start jobs of complete checkpoints, and hand on the rows of ended ones."""
        if step.agreed:
            due = step.last or self._keys.due(self._experiment.training, step.step)
            if due:
                step.checkpoint()
            self._look(step if due else None)
            self._logged = self._logged or bool(step.rows)  # late rows come after those of the attempt's first

    def finish(self, step: Step) -> None:
        """Start the last jobs, which go on after the run."""
        self._looks_at = 0.0
        self._look(step if step.last else None)

    def _look(self, due: Step | None = None) -> None:
        if not self._report.writes or dist.get_rank():
            return
        try:
            if due is not None:
                paths = tuple(str(Path(one).absolute()) for one in self._keys.tasks)
                most, devices = self._keys.task_items, self._keys.job_devices
                self._jobs.ask(Request(due.step, due.tokens, paths, most, self._digests, devices))
            if time.monotonic() < self._looks_at:
                return
            self._looks_at = time.monotonic() + (SLURM_SECONDS if self._cluster.kind == SLURM else LOOK_SECONDS)
            for step in self._jobs.waiting(self._cluster.kind):
                self._start(step)
            for row in read_metrics(self._jobs.rows) if self._logged else ():
                if (step := row.pop("step")) not in self._handed:
                    self._handed.add(step)
                    values = {f"tasks/{name}": value for name, value in row.items()}
                    self._report.late("tasks/step", {"tasks/step": step, **values})
        except (OSError, UserError) as error:  # training goes on, as if the job had failed
            get_logger().error("cannot look after the jobs that score tasks: %s", error)

    def _start(self, step: int) -> None:
        """Start the job of a step if its checkpoint is complete; name it if it has failed."""
        reason = f"it has failed, as {self._jobs.log(step)} says"
        if step not in self._started:
            if not self._jobs.can_start(step):
                return
            try:
                self._jobs.start(step, self._cluster, self._keys.job_devices)
                self._started.add(step)
                return
            except (OSError, SubprocessError, LockedError) as error:
                reason = f"it cannot start ({error})"
        if step not in self._named:
            self._named.add(step)
            get_logger().error(
                "no scores of tasks after step %d from its job: %s. Its checkpoint is kept. To score them now, type "
                "titan-exp evaluate %s --tasks", step, reason, self._jobs.folder.path,
            )  # fmt: skip
