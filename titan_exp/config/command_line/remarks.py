"""Remarks on a composed run: typed overrides without effect, and a tokenizer left at its default."""

from collections.abc import Iterator, Sequence

from titan_exp.config.errors.user_error import shown
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.builtins import BYTES_VOCABULARY
from titan_exp.config.schema.config_diff import flatten
from titan_exp.config.schema.identity_keys import COUNTS_BESIDE, idle_keys, is_among
from titan_exp.config.schema.typed_config import to_dict

FEW_ROWS = 10
"""Rows of the embedding for each token of the tokenizer `bytes` above which a model is no toy."""


def remarks(overrides: Sequence[str], experiment: Experiment) -> Iterator[str]:
    """Sentences about a composed run, printed before it is planned or launched."""
    yield from _idle_overrides(overrides, experiment)
    yield from forgotten_tokenizer(overrides, experiment)


def forgotten_tokenizer(overrides: Sequence[str], experiment: Experiment) -> Iterator[str]:
    """A sentence if a model with a large vocabulary gets bytes by default."""
    rows, key = experiment.model.vocab_size, "data.tokenizer"
    typed = any(override.lstrip("+").startswith(f"{key}=") for override in overrides)
    if experiment.data.tokenizer == "bytes" and not typed and rows > FEW_ROWS * BYTES_VOCABULARY:
        yield (
            f"{key}=bytes, the default, uses {BYTES_VOCABULARY} of the model's {rows:,} tokens: name the model's own, "
            f"{key}=FOLDER, or type {key}=bytes if bytes are meant"
        )


def _idle_overrides(overrides: Sequence[str], experiment: Experiment) -> Iterator[str]:
    """A sentence for each typed key that the value of another key leaves without effect."""
    values = flatten(to_dict(experiment))
    idle = idle_keys(values)
    for override in overrides:
        key = override.partition("=")[0].lstrip("+")
        switch = next((COUNTS_BESIDE[group][0] for group in idle if is_among(key, [group])), key)
        if switch != key and "." in key:  # a group's option sets the switch
            yield f"{override} has no effect with {switch}={shown(values[switch])}"
