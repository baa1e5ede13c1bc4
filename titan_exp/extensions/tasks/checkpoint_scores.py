"""Scores of tasks by a checkpoint of a run, in any layout, with our prompts or those of lm-eval."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.data.tokenizers import build_tokenizer
from titan_exp.extensions.tasks.encoding import encode
from titan_exp.extensions.tasks.scorer import Scorer, scores_of
from titan_exp.extensions.tasks.scores import values_of
from titan_exp.extensions.tasks.tasks import read_all
from titan_exp.inference.evaluate import evaluation_experiment, load_model, mesh_of, own_device
from titan_exp.launch.local.ranks import run_on_ranks
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
            found = _scores(experiment, request, device)
    else:
        found = run_on_ranks(f"{__name__}.rank_main", experiment, request)
    return {"weights": str(source.path), "tasks": found}


def rank_main(run: Run) -> None:
    """Entry point of one rank."""
    serve(run, _scores)


def _scores(experiment: Experiment, request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    source = open_checkpoint(Path(request["path"]), trust=request["trust"], averaged=request["averaged"])
    mesh = mesh_of(experiment, device)
    scorer = Scorer(load_model(source, experiment, mesh), mesh, experiment)
    model = build_tokenizer(experiment.data), experiment.training.seq_len
    if request["lm_eval"]:
        from titan_exp.extensions.tasks.lm_eval_backend import lm_eval_scores  # needs a package

        return lm_eval_scores(request["tasks"], scorer, *model, request["most"])
    return values_of(scores_of(scorer, [encode(one, *model) for one in read_all(request["tasks"], request["most"])]))
