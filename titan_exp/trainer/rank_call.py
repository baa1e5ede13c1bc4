"""A verb on several ranks: what is asked lies in a scratch run folder, and rank 0 leaves the answer there."""

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.typed_config import load_experiment
from titan_exp.tracking.logging import configure_logging
from titan_exp.tracking.run_folder.run_folder import RunFolder, write_atomically
from titan_exp.trainer.distributed import joined

QUESTION, ANSWER = "question.json", "answer.json"
"""Files in the scratch run folder, beside the experiment whose layout the ranks have."""

RunOnRanks = Callable[[str, Experiment, Any], Any]
"""Asks a rank's main function, by its dotted name, in an experiment's layout, a question in JSON's types; returns the
answer of rank 0. The launcher has one for the processes of this machine."""


def answer(run_folder: str, function: Callable[[Experiment, Any, torch.device], Any]) -> None:
    """Join the other ranks, and answer the question in a scratch run folder."""
    folder = RunFolder(run_folder)
    experiment = load_experiment(folder.config)
    question = json.loads((folder.path / QUESTION).read_text(encoding="utf-8"))
    configure_logging(int(os.environ.get("RANK", "0")), folder.logs)
    with joined(experiment.cluster) as device:
        found = function(experiment, question, device)
        if dist.get_rank() == 0:
            write_atomically(folder.path / ANSWER, json.dumps(found))
