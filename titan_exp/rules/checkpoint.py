"""Checkpoints: initial weights, exports, remote storage."""

import re
from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.checkpoint import CheckpointConfig
from titan_exp.config.groups.model import ModelConfig
from titan_exp.config.groups.training import TrainingConfig
from titan_exp.config.paths.checkpoint_paths import huggingface_folder, saved_state
from titan_exp.config.paths.remote_url import is_url, problem_of_url
from titan_exp.models.convert.checkpoint_formats import checkpoint_formats
from titan_exp.rules.rule import rules


def initial_weights_exist(checkpoint: CheckpointConfig) -> Iterator[Violation]:
    """The path holds a complete checkpoint. A URL is opened by the run, when it starts."""
    path = checkpoint.initial
    if path is not None and is_url(path):
        if (problem := problem_of_url(path)) is not None:
            yield Violation("checkpoint.initial", _without_credentials(path), *problem)
    elif path is not None and (not path or (saved_state(path) or huggingface_folder(path)) is None):
        yield Violation(
            "checkpoint.initial",
            path or "''",
            "there is no complete checkpoint",
            "a run folder with checkpoints/step-…, one of these (ls -d runs/*/*/checkpoints/* lists them), or a "
            "Hugging Face folder with config.json and safetensors",
        )


def excluded_weights_are_loaded(checkpoint: CheckpointConfig) -> Iterator[Violation]:
    """Weights can be excluded only from initial weights."""
    if checkpoint.initial_exclude and checkpoint.initial is None:
        yield Violation(
            "checkpoint.initial_exclude",
            checkpoint.initial_exclude,
            "checkpoint.initial is null, so that all weights are initialized anyway",
            "checkpoint.initial=RUN_FOLDER, or checkpoint.initial_exclude=[]",
        )


def pinned_memory_has_a_gpu(checkpoint: CheckpointConfig, device: str) -> Iterator[Violation]:
    """Pinned memory is for copies from a GPU."""
    if checkpoint.mode == "async_pinned" and device == "cpu":
        reason = "memory is pinned for copies from a GPU, and training is on the CPU"
        yield Violation("checkpoint.mode", "async_pinned", reason, "checkpoint.mode=async or async_process")


def zero_steps_are_saved(checkpoint: CheckpointConfig, training: TrainingConfig) -> Iterator[Violation]:
    """A run without steps saves its initial state."""
    if training.steps == 0 and checkpoint.mode == "off":
        reason = "nothing is trained, and checkpoint.mode=off saves nothing"
        yield Violation("training.steps", 0, reason, "checkpoint=sync")


def remote_is_supported(checkpoint: CheckpointConfig) -> Iterator[Violation]:
    """The protocol of the remote URL is installed, and checkpoints are saved."""
    if checkpoint.remote is None:
        return
    url = _without_credentials(checkpoint.remote)
    if (problem := problem_of_url(checkpoint.remote)) is not None:
        yield Violation("checkpoint.remote", url, *problem)
    if checkpoint.mode == "off":
        reason = "no checkpoint is saved (checkpoint.mode=off), so none can be uploaded"
        yield Violation("checkpoint.remote", url, reason, "checkpoint=async, or checkpoint.remote=null")


def exports_have_names(checkpoint: CheckpointConfig, model: ModelConfig) -> Iterator[Violation]:
    """The family has Hugging Face tensor names; steps between exports are given only with exports."""
    if checkpoint.export != "none" and "huggingface" not in checkpoint_formats(model):
        yield Violation(
            "checkpoint.export",
            checkpoint.export,
            f"model.architecture={model.architecture} has no tensor names in Hugging Face's format",
            "checkpoint.export=none; titan-exp convert RUN weights.pt writes any model",
        )
    if checkpoint.export == "none" and checkpoint.export_every is not None:
        yield Violation(
            "checkpoint.export_every",
            checkpoint.export_every,
            "checkpoint.export is none, so that nothing is exported",
            "checkpoint.export=bf16 or fp32, or checkpoint.export_every=null",
        )


def _without_credentials(url: str) -> str:
    return re.sub(r"://[^/]*@", "://***@", url.partition("?")[0]) or "''"


RULES = rules(
    excluded_weights_are_loaded, pinned_memory_has_a_gpu, zero_steps_are_saved, remote_is_supported, exports_have_names
)
"""Rules that hold at every start."""

BEGINNING_RULES = rules(initial_weights_exist)
"""Rules about inputs of a run's first start, skipped when it continues."""
