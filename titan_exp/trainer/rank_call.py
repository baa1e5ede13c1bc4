"""Run a function on all ranks; request and response are JSON files in a scratch run folder."""

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

REQUEST, RESPONSE = "request.json", "response.json"
"""Files in the scratch run folder, beside the experiment that gives the ranks their layout."""

RunOnRanks = Callable[[str, Experiment, Any], Any]
"""Calls `serve` for a rank function, given by import path, on the ranks of an experiment's layout, with a JSON request;
returns rank 0's response."""


def serve(run_folder: str, function: Callable[[Experiment, Any, torch.device], Any]) -> None:
    """Join the process group, call `function` on the request in a scratch run folder, and write rank 0's response."""
    folder = RunFolder(run_folder)
    experiment = load_experiment(folder.config, trust=True)
    request = json.loads((folder.path / REQUEST).read_text(encoding="utf-8"))
    configure_logging(int(os.environ.get("RANK", "0")), folder.logs)
    with joined(experiment.cluster) as device:
        response = function(experiment, request, device)
        if dist.get_rank() == 0:
            write_atomically(folder.path / RESPONSE, json.dumps(response))
