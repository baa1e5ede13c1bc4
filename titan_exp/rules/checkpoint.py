"""Rules about what is saved, and about the weights that a run begins with."""

import re
from collections.abc import Iterator

from titan_exp.config.errors.user_error import Violation
from titan_exp.config.groups.builtins import ARCHITECTURES
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.machine.devices import device_type
from titan_exp.config.paths.checkpoint_paths import huggingface_folder, saved_state
from titan_exp.config.paths.remote_url import is_url, problem_of_url
from titan_exp.rules.rule import rules


def initial_weights_are_there(experiment: Experiment) -> Iterator[Violation]:
    """The path holds a complete checkpoint. What is behind a URL is looked at by the run, when it starts."""
    asked = experiment.checkpoint.initial
    if asked is not None and is_url(asked):
        if (found := problem_of_url(asked)) is not None:
            yield Violation("checkpoint.initial", _shown_url(asked), *found)
    elif asked is not None and (not asked or (saved_state(asked) or huggingface_folder(asked)) is None):
        yield Violation(
            "checkpoint.initial",
            asked or "''",
            "there is no complete checkpoint",
            "a run folder with checkpoints/step-…, one of these (ls -d runs/*/*/checkpoints/* lists those at hand), or "
            "a Hugging Face folder with config.json and safetensors",
        )


def what_is_excluded_is_of_something(experiment: Experiment) -> Iterator[Violation]:
    """Weights can be left out only of weights that are loaded."""
    config = experiment.checkpoint
    if config.initial_exclude and config.initial is None:
        yield Violation(
            "checkpoint.initial_exclude",
            config.initial_exclude,
            "checkpoint.initial is null, so that all weights are drawn anyway",
            "checkpoint.initial=RUN_FOLDER, or checkpoint.initial_exclude=[]",
        )


def pinned_memory_is_for_gpus(experiment: Experiment) -> Iterator[Violation]:
    """Pinned memory is what a GPU copies into; without one there is nothing to pin."""
    if experiment.checkpoint.mode == "async_pinned" and device_type(experiment.cluster) == "cpu":
        yield Violation(
            "checkpoint.mode",
            "async_pinned",
            "memory is pinned for copies from a GPU, and training is on the CPU",
            "checkpoint.mode=async or async_process",
        )


def a_beginning_is_saved(experiment: Experiment) -> Iterator[Violation]:
    """Without steps, a checkpoint is all that a run leaves."""
    if experiment.training.steps == 0 and experiment.checkpoint.mode == "off":
        yield Violation(
            "training.steps", 0, "nothing is trained, and checkpoint.mode=off saves nothing", "checkpoint=sync"
        )


def the_remote_place_can_be_spoken_to(experiment: Experiment) -> Iterator[Violation]:
    """The remote place is a URL of a protocol that is installed here, and there is something to keep in it."""
    config = experiment.checkpoint
    if config.remote is None:
        return
    if (found := problem_of_url(config.remote)) is not None:
        yield Violation("checkpoint.remote", _shown_url(config.remote), *found)
    if config.mode == "off":
        yield Violation(
            "checkpoint.remote",
            _shown_url(config.remote),
            "no checkpoint is made (checkpoint.mode=off), so none can be kept",
            "checkpoint=async, or checkpoint.remote=null",
        )


def _shown_url(url: str) -> str:
    """A URL without what may be a credential in it."""
    return re.sub(r"://[^/]*@", "://***@", url.partition("?")[0]) or "''"


def exports_are_of_the_decoder(experiment: Experiment) -> Iterator[Violation]:
    """Hugging Face's names are known for the built-in decoder; steps between exports mean something with exports."""
    config, architecture = experiment.checkpoint, experiment.model.architecture
    if config.export != "none" and architecture not in ARCHITECTURES:
        yield Violation(
            "checkpoint.export",
            config.export,
            f"a Hugging Face folder holds a Llama, and model.architecture is {architecture}",
            "checkpoint.export=none; titan-exp convert RUN weights.pt writes any model",
        )
    if config.export == "none" and config.export_every is not None:
        yield Violation(
            "checkpoint.export_every",
            config.export_every,
            "checkpoint.export is none, so that nothing is exported",
            "checkpoint.export=bf16 or fp32, or checkpoint.export_every=null",
        )


RULES = rules(
    what_is_excluded_is_of_something,
    pinned_memory_is_for_gpus,
    a_beginning_is_saved,
    the_remote_place_can_be_spoken_to,
    exports_are_of_the_decoder,
)
"""Rules that hold at every start."""

BEGINNING_RULES = rules(
    initial_weights_are_there,
)
"""Rules about what is read when a run begins, and not when it goes on."""
