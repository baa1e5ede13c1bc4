"""Rules of the tasks, which import no torch."""

import dataclasses
from collections.abc import Iterator

from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.run import LOCAL, SLURM
from titan_exp.extensions.tasks.tasks import job_cluster, tasks_of
from titan_exp.rules.rule import rules


def tasks_are_read(whole: Experiment) -> Iterator[Violation]:
    """Every task can be read, and the model predicts tokens."""
    paths = whole.evaluation.tasks  # type: ignore[attr-defined]  # TaskKeys
    if not whole.model.vocab_size:
        reason = f"model.architecture={whole.model.architecture} predicts no tokens"
        yield Violation("evaluation.tasks", paths, reason, "use evaluation.tasks=[]")
        return
    try:
        tasks_of(whole)
    except UserError as error:
        yield Violation("evaluation.tasks", paths, str(error), "give files or folders of tasks (titan-exp help tasks)")


def jobs_can_run(whole: Experiment) -> Iterator[Violation]:
    """Every job has a checkpoint, and resources of its own."""
    within = "use evaluation.where=training"
    if whole.checkpoint.mode == "off":
        yield Violation("evaluation.where", "jobs", "a job scores a checkpoint, and this run saves none", within)
    try:
        cluster = job_cluster(whole)
    except UserError as error:
        for one in error.violations:
            yield dataclasses.replace(one, field=one.field.replace("cluster", "evaluation.job", 1))
        return
    if cluster.kind not in (LOCAL, SLURM):
        yield Violation("evaluation.where", "jobs", f"cluster.kind={cluster.kind} starts no jobs of its own", within)
    elif cluster.kind == SLURM and cluster.container_image is not None:
        yield Violation("evaluation.where", "jobs", "training is in a container, which has no sbatch", within)
    elif cluster.kind == LOCAL and device_type(cluster) == "cuda" and not cluster.environment.get(GPUS):
        remedy = f"use +evaluation.job.environment.{GPUS}=7, for GPU 7, or +evaluation.job.device=cpu"
        yield Violation("evaluation.where", "jobs", "on this machine a job needs a GPU of its own", remedy)


GPUS = "CUDA_VISIBLE_DEVICES"
RULES = rules(tasks_are_read, when=lambda evaluation: evaluation.tasks and evaluation.enabled) + rules(
    jobs_can_run, when=lambda evaluation: evaluation.tasks and evaluation.enabled and evaluation.where == "jobs"
)
