"""Description of the extension, and its keys of the group `evaluation`."""

from dataclasses import dataclass, field
from typing import Any, Literal

from titan_exp.config.extension import Extension
from titan_exp.config.groups.types import PositiveInt


@dataclass(frozen=True)
class TaskKeys:
    """Tasks that every evaluation scores."""

    tasks: tuple[str, ...] = ()
    """Tasks to score with each evaluation, by the files or folders that hold them: rendered requests of OLMo, YAML of
    lm-eval with local files, or a CORE bundle. Each is logged as `tasks/NAME/METRIC`.
    E.g. `evaluation.tasks='[tasks/arc_easy]'`."""
    where: Literal["training", "jobs"] = "training"
    """Process that scores the tasks. With `jobs`, training saves a checkpoint at each evaluation and starts a job for
    it, which scores in the run's precision.

    The checkpoint is kept until its tasks are scored. Scores are in `tasks.jsonl` and `tasks/` of the run folder, and
    W&B has them over `tasks/step`. `titan-exp evaluate RUN --tasks` scores what jobs failed to score.
    E.g. `evaluation.where=jobs`."""
    job: dict[str, Any] = field(default_factory=dict)
    """Keys of the group `cluster` that differ for the jobs, such as `{partition: small, time_limit: 30}`. Those on this
    machine run one at a time. E.g. `evaluation.where=jobs +evaluation.job.device=cpu`."""
    job_devices: PositiveInt = 1
    """Number of devices of a job, over which it shards the model. E.g. `evaluation.where=jobs
    evaluation.job_devices=2`."""
    task_items: PositiveInt | None = None
    """Largest number of items of each task, the first of its file; null takes all. E.g. `evaluation.task_items=200`."""


def asked(experiment: Any) -> bool:
    """True for a run that scores tasks."""
    return experiment.evaluation.enabled and bool(experiment.evaluation.tasks)


HERE = "titan_exp.extensions.tasks"

EXTENSION = Extension(
    name="tasks",
    summary="Downstream tasks from local files, scored while training and by titan-exp evaluate --tasks.",
    groups={"evaluation": f"{HERE}.extension:TaskKeys"},
    not_in_run_id={
        "evaluation.where": "which process scores tasks",
        "evaluation.job": "where jobs run",
        "evaluation.job_devices": "how jobs shard the model",
    },
    rules=f"{HERE}.tasks",
    asked=f"{HERE}.extension:asked",
    parts={"tasks": f"{HERE}.part:parts"},
    evaluations=f"{HERE}.planned:evaluations",
    metrics=("tasks/bits_per_byte", "tasks/acc_centered"),
    sections=f"{HERE}.compare:sections",
    verbs={"evaluate --tasks": f"{HERE}.evaluate:evaluate_tasks"},
    unfinished=f"{HERE}.jobs:report",
    late={"tasks/": "tasks.jsonl"},
    usage={
        "evaluate": """
               titan-exp evaluate RUN --tasks PATH... scores tasks: titan-exp help tasks
               titan-exp evaluate RUN --tasks scores what jobs of the run failed to score
"""
    },
)
