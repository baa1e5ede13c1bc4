"""Description of the extension."""

from titan_exp.config.extension import Extension

HERE = "titan_exp.extensions.tasks"

EXTENSION = Extension(
    name="tasks",
    summary="Downstream tasks from local files, scored while training and by titan-exp evaluate --tasks.",
    groups={"evaluation": f"{HERE}.config:TaskKeys"},
    not_in_run_id={
        "evaluation.where": "which process scores tasks",
        "evaluation.job": "where jobs run",
        "evaluation.job_devices": "how jobs shard the model",
    },
    rules=f"{HERE}.rules",
    asked=f"{HERE}.config:asked",
    parts={"tasks": f"{HERE}.part:parts"},
    evaluations=f"{HERE}.planned:evaluations",
    metrics=("tasks/bits_per_byte", "tasks/acc_centered"),
    sections=f"{HERE}.compare:sections",
    verbs={"evaluate --tasks": f"{HERE}.evaluate:evaluate_tasks"},
    unfinished=f"{HERE}.jobs:report",
    usage={
        "evaluate": """
               titan-exp evaluate RUN --tasks PATH... scores tasks: titan-exp help tasks
               titan-exp evaluate RUN --tasks scores what jobs of the run failed to score
""",
    },
)
