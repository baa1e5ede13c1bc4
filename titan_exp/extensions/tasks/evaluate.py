"""`titan-exp evaluate RUN --tasks PATH...`: tasks scored by a checkpoint in place, in any layout."""

import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

USAGE = """\
titan-exp evaluate RUN|FOLDER --tasks PATH... [step=N] [training.seq_len=N] [training.micro_batch_size=N]
                   [evaluation.task_items=N] [parallelism.KEY=VALUE] [paths.runs=FOLDER] [backend=lm-eval]
                   [--averaged] [--json] [--trust]
  for example: titan-exp evaluate first --tasks tasks/arc_easy tasks/lambada.yaml

  A PATH holds rendered requests as OLMo's (a folder of config.json and requests.jsonl.gz, or a folder of such folders),
  a task of lm-eval with local files (YAML), or a CORE bundle (YAML). titan-exp help tasks says more.
  training.seq_len=N is the longest context, the run's by default. parallelism.dp_shard=2 starts two processes.
  backend=lm-eval gives the model to the lm-evaluation-harness itself, which needs its package (the extra lm-eval) and
  takes its own tasks (YAML). --json prints the scores of each item, too.

titan-exp evaluate RUN --tasks
  scores, in this process, what the jobs of a run with evaluation.where=jobs failed to score."""


def evaluate_tasks(argv: Sequence[str]) -> int:
    """Score tasks by a checkpoint.

    Returns the exit code.
    """
    from titan_exp.config.command_line.options import HELP

    if set(argv) & set(HELP):
        print(USAGE)
        return 0
    return _evaluate(argv)


def _evaluate(argv: Sequence[str]) -> int:
    from titan_exp.checkpoint.checkpoint_cache import local_copy
    from titan_exp.config.command_line.options import take_options
    from titan_exp.config.command_line.verb_options import EvaluateOptions
    from titan_exp.config.errors.user_error import UserError
    from titan_exp.extensions.tasks.checkpoint_scores import score_checkpoint
    from titan_exp.extensions.tasks.jobs import retry
    from titan_exp.extensions.tasks.tasks import read_all
    from titan_exp.launch.run_lookup import run_path

    argv = shlex.split(re.sub(r"--backend[ =]", "backend=", shlex.join(argv)))
    options, rest = take_options(EvaluateOptions, argv, others=["--tasks"])
    backends = [word.partition("=")[2] for word in rest if word.startswith("backend=")]
    rest = [word for word in rest if not word.startswith("backend=")]
    if backends and (backends[-1] != "lm-eval" or find_spec("lm_eval") is None):
        given = f"backend={backends[-1]}"
        if backends[-1] == "lm-eval":
            raise UserError(f"{given}: there is no package lm_eval here. Type pip install 'titan_exp[lm-eval]'.")
        raise UserError(f"{given}: there is no such backend. Use backend=lm-eval, or leave it out.")
    words = [word for word in rest if "=" not in word or "/" in word.partition("=")[0]]
    at = words.index("--tasks")
    names, paths = words[:at], words[at + 1 :]
    names, paths = (names, paths) if names else (paths[:1], paths[1:])
    if len(names) != 1 or (not paths and (backends or options.step or len(rest) > 2)):
        raise UserError(USAGE)
    if not paths:
        return retry(Path(run_path(names[0], options.runs)), trust=options.trust)
    limits = [word for word in rest if word.startswith("evaluation.task_items=")]
    most = _number(limits[-1].partition("=")[2]) if limits else None
    if not backends:
        read_all(paths, most)  # refused before a model is loaded
    path = local_copy(run_path(names[0], options.runs), step=options.step)
    overrides = [word for word in rest if word not in words and word not in limits]
    request = {"tasks": paths, "most": most, "trust": options.trust, "averaged": options.averaged}
    found = score_checkpoint(path, overrides, {**request, "lm_eval": bool(backends)}, step=options.step)
    _show(found, as_json=options.json)
    return 0


def _number(text: str) -> int:
    from titan_exp.config.errors.user_error import UserError

    if not text.isascii() or not text.isdigit() or not int(text):
        raise UserError(f"evaluation.task_items={text}: this must be a whole number above 0.")
    return int(text)


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
