"""State or weights of another run, with which a run begins."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from titan_exp.checkpoint.checkpointer import Checkpointer
from titan_exp.checkpoint.load_state import RestoredState, load_state, read_progress
from titan_exp.checkpoint.remote.checkpoint_cache import local_copy
from titan_exp.checkpoint.state_dict import WEIGHTS_ONLY_KEY
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.paths.checkpoint_files import initial_folder, step_of
from titan_exp.config.paths.remote_url import is_url, parent_checkpoint, parent_location
from titan_exp.rules.continue_from import model_misfits_of, state_misfits
from titan_exp.rules.weights.given_weights import (
    from_config,
    given_weights,
    noted_changes,
    require_fit,
    tokenizer_misfit,
)
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.lineage import Lineage


def load_parent_state(
    experiment: Experiment,
    checkpointer: Checkpointer,
    parts: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    *,
    keeps: Collection[str],
    cache: Path,
    lineage: Lineage | None,
) -> tuple[RestoredState, Lineage]:
    """Load the checkpoint of `checkpoint.continue_from` into the model and the optimizer.

    `lineage` is that of an earlier start, whose step is taken again; `keeps` is as in `load_state`. Raises UserError if
    there is no such checkpoint, or it is damaged, holds weights only, or does not fit.
    """
    config = experiment.checkpoint
    assert config.continue_from is not None, "the caller checks"
    location = parent_location(config.continue_from, Path(experiment.paths.runs).expanduser().absolute())
    # All ranks take rank 0's: a parent that is still training may save or delete while they look.
    lineage = checkpointer.from_leader(lineage)
    step = config.continue_step if lineage is None else lineage.step
    if is_url(location) and step_of(Path(location)) is not None:
        step = None  # the URL is that of the checkpoint itself
    local = str(local_copy(location, cache=cache, step=step or 0))
    path = checkpointer.from_leader(parent_checkpoint(local, step))
    if path is None:
        of_step = "" if step is None else f" of step {step}"
        raise UserError(f"checkpoint.continue_from={config.continue_from}: it has no complete checkpoint{of_step}")
    progress = checkpointer.read_parent(path)
    saved = progress.get("config") or {}
    found = [
        *model_misfits_of(saved, config, experiment.model, experiment.data),
        *state_misfits(saved, config, experiment.paths, experiment.optimizer, experiment.experiment),
    ]
    if found:
        raise UserError("This run cannot be continued.", found)
    if progress.get(WEIGHTS_ONLY_KEY):
        raise UserError(
            f"checkpoint.continue_from={config.continue_from}: its checkpoint of step {progress['step']} holds weights "
            "only (checkpoint.last=weights). Start a new run from them: checkpoint.continue_from=null "
            f"checkpoint.initial={location}"
        )
    return load_state(path, parts, optimizer, keeps), Lineage(location, progress["step"], progress["tokens"])


def require_same_function(experiment: Experiment, path: str) -> None:
    """Compare the model and the tokenizer with those of the weights of `checkpoint.initial`, and log what may be meant.

    `path` is where they are on this machine. Raises UserError if the same weights would compute something else.
    """
    config, folder = experiment.checkpoint, initial_folder(path)
    assert config.initial is not None, "the caller checks"
    if folder is None:
        return  # the load says so
    given = given_weights(config.initial, folder, experiment.model)
    if given is None:
        with suppress(KeyError):  # a checkpoint of another tool
            given = from_config(config.initial, read_progress(folder)["config"])
    if given is None:
        get_logger().warning("checkpoint.initial: no model is described beside it: names and shapes alone are compared")
        return
    exclude, accepted = config.initial_exclude, config.accept_changes
    require_fit(experiment.model, given, exclude, accepted)
    if found := list(tokenizer_misfit(experiment.data, experiment.model, given, exclude=exclude, accepted=accepted)):
        raise UserError("The weights know other words.", found)
    if changes := noted_changes(experiment.model, given, accepted):
        get_logger().info("checkpoint.initial: the weights are given another model: %s", changes)
