"""Mode rules: a key of one mode is not set beside another, as an optimizer has no key of another optimizer."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from titan_exp.config.errors.user_error import Violation, listed
from titan_exp.config.groups.training import GradClipConfig, WeightAverageConfig
from titan_exp.config.schema.identity_keys import COUNTS_BESIDE
from titan_exp.config.schema.schema import choices_of, hints
from titan_exp.rules.rule import rules


def clipping_has_its_own_keys(grad_clip: GradClipConfig) -> Iterator[Violation]:
    """Keys of the other modes of clipping have their defaults."""
    return keys_of_other_modes("grad_clip", grad_clip)


def average_has_its_own_keys(weight_average: WeightAverageConfig) -> Iterator[Violation]:
    """Keys of the other averages have their defaults."""
    return keys_of_other_modes("weight_average", weight_average)


def keys_of_other_modes(group: str, config: Any) -> Iterator[Violation]:
    """Keys that the `mode` of a group's `config` does not read, and that are not at their defaults."""
    modes = choices_of(hints(type(config))["mode"])
    for field in dataclasses.fields(config):
        key, value = f"{group}.{field.name}", getattr(config, field.name)
        switch, idle = COUNTS_BESIDE.get(key, ("", ()))
        if switch == f"{group}.mode" and config.mode in idle and value != field.default:
            others = listed(f"{group}={mode}" for mode in modes if mode not in idle)
            yield Violation(key, value, f"{group}={config.mode} does not read this key", f"it comes with {others}")


MODE_RULES = rules(clipping_has_its_own_keys, average_has_its_own_keys)
