"""Verb `titan-exp evaluate RUN --tasks PATH...`."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from titan_exp.config.command_line.verb_options import EvaluateOptions
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.types import PositiveInt
from titan_exp.extensions.tasks.tasks import read_all

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
    from titan_exp.extensions.tasks.checkpoint_scores import score_checkpoint

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
