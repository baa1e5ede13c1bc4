"""Summary of what the experts of a finished small run specialise in."""

from collections.abc import Iterator
from pathlib import Path

import torch

from titan_exp.checkpoint.formats.open_checkpoint import open_checkpoint
from titan_exp.config.errors.user_error import UserError
from titan_exp.inference.evaluate import Observed, evaluate_source, evaluation_experiment
from titan_exp.inference.expert_classes import lines
from titan_exp.parallel.mesh import build_mesh
from titan_exp.trainer.distributed import joined_process_group

TOKENS = 2**15
"""Held-out tokens that are classified, about."""

EXPERTS = 4
"""Experts per layer that are named."""


def learned_experts(run_folder: Path) -> Iterator[str]:
    """Lines about the most specialized experts of each layer, measured on held-out text on one device."""
    try:
        source = open_checkpoint(run_folder)
        experiment = evaluation_experiment(run_folder, source, [])
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with joined_process_group(device):
            mesh = build_mesh(experiment.parallelism, device, experts=True)
            found = evaluate_source(source, experiment, mesh, observed=Observed(experts=True), most_tokens=TOKENS)
    except UserError as error:  # no checkpoint or no held-out text: the run itself is complete
        yield f"what its experts learned is not measured: {str(error).splitlines()[0]}"
        return
    yield from lines(found.layers, found.result.tokens, most=EXPERTS)
