"""State with which a run begins: its newest checkpoint, that of another run, given weights, or initial weights."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist

from titan_exp.checkpoint.formats.open_checkpoint import load_hf_sharded
from titan_exp.checkpoint.remote.checkpoint_cache import local_copy
from titan_exp.checkpoint.state_dict import WEIGHTS_ONLY_KEY
from titan_exp.config.errors.user_error import UserError
from titan_exp.config.paths.checkpoint_files import huggingface_folder
from titan_exp.config.schema.config_diff import differences
from titan_exp.config.schema.typed_config import to_dict
from titan_exp.tracking.logging import get_logger
from titan_exp.tracking.run_folder.lineage import Lineage
from titan_exp.trainer.commit import Commit
from titan_exp.trainer.log_head import log_lineage
from titan_exp.trainer.parent_state import load_parent_state, require_same_function
from titan_exp.trainer.profiling.compile_cache import cache_of
from titan_exp.trainer.training import Training

PARTS, ENDED = "parts", "ended"
"""Progress keys: states of parts by name, and the reason for which one has ended training before its last step."""


def restore_state(trainer: Training, commit: Commit) -> None:
    """Load weights, optimizer, data position and progress; all ranks call it.

    Raises:
        UserError: a checkpoint is damaged, or training cannot continue from it.
    """
    checkpointer = trainer.checkpointer
    step = checkpointer.latest() if commit.restores else None
    if commit.takes_over():
        trainer.state.built.init_weights()  # replaced by those of a living world
    elif step is not None:
        _continue_own(trainer, step)
    elif trainer.experiment.checkpoint.continue_from is not None:
        _continue_parent(trainer)
    else:
        _load_initial_weights(trainer)


def adopt_progress(trainer: Training, progress: Mapping[str, Any]) -> None:
    """Take over step, tokens and states of parts from a checkpoint or another world."""
    trainer.step, trainer.tokens = progress["step"], progress["tokens"]
    trainer.ended = progress.get(ENDED)
    # Older checkpoints have states beside the step.
    names = {part.name for part in trainer.parts}
    older = {name: state for name, state in progress.items() if name in names}
    trainer.parts.restore(progress.get(PARTS, older), trainer.step)


def _continue_own(trainer: Training, step: int) -> None:
    restored = trainer.checkpointer.load(step, trainer.model.parts, trainer.optimizer, trainer.parts.keeps)
    adopt_progress(trainer, restored.progress)
    if not restored.progress.get(WEIGHTS_ONLY_KEY):
        trainer.loader.load_state_dict(restored.data)
    elif not trainer.is_over:
        raise UserError(
            f"{trainer.checkpointer.folder.path_of(step)} holds weights only (checkpoint.last=weights): training "
            f"cannot continue after step {step}. Start a new run from them: checkpoint.initial={trainer.folder.path}"
        )
    get_logger().info("continuing after step %d", trainer.step)
    _log_changes(trainer, restored.progress.get("config"))


def _continue_parent(trainer: Training) -> None:
    """Begin with the whole state of `checkpoint.continue_from`."""
    experiment, folder = trainer.experiment, trainer.folder
    restored, lineage = load_parent_state(
        experiment,
        trainer.checkpointer,
        trainer.model.parts,
        trainer.optimizer,
        keeps=trainer.parts.keeps,
        cache=cache_of(folder, experiment.experiment.name) / "remote",
        lineage=Lineage.read(folder.path),
    )
    progress = {key: value for key, value in restored.progress.items() if key != ENDED}
    adopt_progress(trainer, {**progress, "step": lineage.step, "tokens": lineage.tokens})
    if trainer.is_over:
        raise UserError(
            f"checkpoint.continue_from={experiment.checkpoint.continue_from}: its checkpoint is of step "
            f"{trainer.step}, and this run ends at step {experiment.training.last_step}. Give more steps "
            "(training.steps, training.stop_after)."
        )
    if experiment.checkpoint.continue_data == "same":
        trainer.loader.load_state_dict(restored.data)
    if dist.get_rank() == 0:
        lineage.write(folder.path)
        log_lineage(folder)
    _log_changes(trainer, restored.progress.get("config"))


def _load_initial_weights(trainer: Training) -> None:
    """Load `checkpoint.initial`, if given, and initialize the weights that it does not give."""
    experiment, built = trainer.experiment, trainer.state.built
    config = experiment.checkpoint
    if config.initial is None:
        built.init_weights()
        return
    exclude = config.initial_exclude
    built.init_weights(lambda name: any(fnmatchcase(name, pattern) for pattern in exclude))
    cache = cache_of(trainer.folder, experiment.experiment.name)
    path = str(local_copy(config.initial, cache=cache / "remote"))
    require_same_function(experiment, path)
    folder = huggingface_folder(path)
    if folder is None:
        trainer.checkpointer.load_initial_weights(trainer.model.parts, path)
        return
    for part in trainer.model.parts:
        load_hf_sharded(part, experiment.model, folder, exclude, config.accept_changes)
    get_logger().info("weights from %s", folder)


def _log_changes(trainer: Training, saved: Any) -> None:
    changed = differences(saved, to_dict(trainer.experiment))
    if changed:
        get_logger().info("changed since that checkpoint; the new values apply:%s", "".join(changed))
