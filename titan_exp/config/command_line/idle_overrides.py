"""Typed overrides without effect, such as a key of another mode."""

from collections.abc import Iterator, Sequence

from titan_exp.config.errors.user_error import shown
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.schema.config_diff import flatten
from titan_exp.config.schema.identity_keys import COUNTS_BESIDE, idle_keys, is_among
from titan_exp.config.schema.typed_config import to_dict


def idle_overrides(overrides: Sequence[str], experiment: Experiment) -> Iterator[str]:
    """A sentence for each typed key that the value of another key leaves without effect."""
    values = flatten(to_dict(experiment))
    idle = idle_keys(values)
    for override in overrides:
        key = override.partition("=")[0].lstrip("+")
        switch = next((COUNTS_BESIDE[group][0] for group in idle if is_among(key, [group])), key)
        if switch != key and "." in key:  # a group's option sets the switch
            yield f"{override} has no effect with {switch}={shown(values[switch])}"
