"""Scores of tasks by a checkpoint in processes of its own, and by a model that is there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titan_exp.checkpoint.formats.open_checkpoint import OpenCheckpoint, open_checkpoint
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.data.tokenizers import build_tokenizer
from titan_exp.extensions.tasks.encoding import EncodedTask, Row, encode
from titan_exp.extensions.tasks.evaluations import values_of
from titan_exp.extensions.tasks.scorer import Scorer
from titan_exp.extensions.tasks.scores import TaskScores, score
from titan_exp.extensions.tasks.tasks import read_all
from titan_exp.inference.evaluate import evaluation_experiment, load_model, mesh_of, own_device
from titan_exp.launch.local.ranks import run_on_ranks
from titan_exp.parallel.mesh import Mesh
from titan_exp.tracking.run_folder.run import Run
from titan_exp.trainer.distributed import joined_process_group, serve


def score_checkpoint(path: Path, overrides: Sequence[str], request: dict[str, Any], step: int = 0) -> dict[str, Any]:
    """Scores by a checkpoint of a run: `weights`, its path, and `tasks` as in the files that training writes. The
    request has `tasks`, their paths, `most` items of each, and the flags `trust`, `averaged` and `lm_eval`."""
    source = open_checkpoint(path, step, trust=request["trust"], averaged=request["averaged"])
    experiment = evaluation_experiment(path, source, overrides, True, request["trust"])
    request |= {"path": str(source.path), "tasks": [str(Path(one).absolute()) for one in request["tasks"]]}
    if ResolvedLayout.of(experiment).world_size == 1:
        with joined_process_group(device := own_device()):
            found = _scores(experiment, request, mesh_of(experiment, device))
    else:
        found = run_on_ranks(f"{__name__}.rank_main", experiment, request)
    return {"weights": str(source.path), **found}


def rank_main(run: Run) -> None:
    """Entry point of one rank."""

    serve(run, lambda experiment, request, device: _scores(experiment, request, mesh_of(experiment, device)))


def _scores(experiment: Experiment, request: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Scores of the tasks as values of JSON."""

    source = open_checkpoint(Path(request["path"]), trust=request["trust"], averaged=request["averaged"])
    scorer, tokenizer, length = (
        scorer_of(source, experiment, mesh),
        build_tokenizer(experiment.data),
        experiment.training.seq_len,
    )
    if request["lm_eval"]:
        from titan_exp.extensions.tasks.lm_eval_backend import lm_eval_scores

        return lm_eval_scores(request["tasks"], scorer, tokenizer, length, request["most"])
    tasks = [encode(one, tokenizer, length) for one in read_all(request["tasks"], request["most"])]
    return {"tasks": values_of(scores_of(scorer, tasks))}


def scorer_of(source: OpenCheckpoint, experiment: Experiment, mesh: Mesh) -> Scorer:
    """Scorer by the model of a checkpoint, which is loaded, in `training.mixed_precision`."""
    return Scorer(load_model(source, experiment, mesh), mesh, experiment)


def scores_of(scorer: Scorer, tasks: Sequence[EncodedTask]) -> list[TaskScores]:
    """Score tasks together, so that rows of equal length share batches; all ranks must call it."""
    rows = [row for one in tasks for row in (*one.rows, *one.neutral)]
    total, greedy = scorer.log_likelihoods(rows)
    found, first = [], 0
    for one in tasks:
        middle, last = first + len(one.rows), first + len(one.rows) + len(one.neutral)
        cells, hits = _cells(one, one.rows, total[first:middle]), np.ones(one.windows.shape, dtype=bool)
        for row, hit in zip(one.rows, greedy[first:middle], strict=True):
            hits[row.item, row.choice] &= hit
        neutral = _cells(one, one.neutral, total[middle:last]) if one.neutral else None
        found.append(score(one, cells, hits & (one.windows > 0), neutral))
        first = last
    return found


def _cells(task: EncodedTask, rows: Sequence[Row], values: np.ndarray) -> np.ndarray:
    """Sums [items, choices] of the rows' values."""
    cells, counts = np.zeros(task.windows.shape), np.zeros(task.windows.shape, dtype=np.int64)
    for row, value in zip(rows, values, strict=True):
        cells[row.item, row.choice] += value
        counts[row.item, row.choice] += 1
    assert rows is not task.rows or np.array_equal(counts, task.windows), "every window has its score once"
    return cells
