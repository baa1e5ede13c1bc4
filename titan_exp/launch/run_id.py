"""A run is named by what it computes: a hash of its resolved configuration, less the keys that do not change that.

So the same command finds the same folder, and a sweep launched twice starts only what is missing.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.optimizer import AdamWConfig
from titan_exp.config.schema.identity_keys import IN_RUN_ID_WHEN_SET, LAYOUT, NOT_IN_RUN_ID
from titan_exp.config.schema.typed_config import to_dict

ID_LENGTH = 12
"""Hexadecimal digits of an id: 48 bits, so among a million runs two collide with a probability of 0.2 %."""


def run_id(experiment: Experiment) -> str:
    """Name of the run: what is computed, and in which layout. The layout must be resolved (no degree of -1).

    Raises:
        UserError: a value has no stable identity.
    """
    return _digest(experiment, NOT_IN_RUN_ID)


def experiment_id(experiment: Experiment) -> str:
    """Name of what is computed, the same in every layout.

    Raises:
        UserError: a value has no stable identity.
    """
    return _digest(experiment, [*NOT_IN_RUN_ID, *LAYOUT])


def canonical(value: object, key: str = "") -> str:
    """The one JSON text of a value: keys sorted, no spaces, floats as Python's `repr`.

    Raises:
        UserError: a part of it is no JSON value or not finite, so that it has no stable text. `key` is its name.
    """
    _require_stable(value, key)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(experiment: Experiment, without: Iterable[str]) -> str:
    config = to_dict(experiment)
    if experiment.quantization.recipe == "none":
        # Other keys have no effect then, and the id is that of a run from before there were recipes.
        config["quantization"] = {"recipe": "none"}
    elif not experiment.quantization.stochastic_rounding:
        del config["quantization"]["stochastic_rounding"]
    if isinstance(experiment.optimizer, AdamWConfig) and experiment.optimizer.state_precision == "fp32":
        del config["optimizer"]["state_precision"]
    if experiment.training.objective == "language_modeling":
        del config["training"]["objective"], config["training"]["objective_options"]
    if not experiment.compile.cuda_graphs:
        del config["compile"]["cuda_graphs"]
    begins_with = {key: _get(config, key.split(".")) for key in IN_RUN_ID_WHEN_SET}
    for key in without:
        _remove(config, key.split("."))
    # Without them the id is that of a run from before there were such keys.
    if begins_with[IN_RUN_ID_WHEN_SET[0]] is not None:
        config |= begins_with
    return hashlib.sha256(canonical(config).encode()).hexdigest()[:ID_LENGTH]


def _get(config: dict[str, Any], path: Sequence[str]) -> Any:
    for part in path:
        config = config[part]
    return config


def _remove(config: dict[str, Any], path: list[str]) -> None:
    for part in path[:-1]:
        config = config[part]
    config.pop(path[-1], None)


def _require_stable(value: object, key: str) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise UserError(f"{key}: its key {name!r} is not text, so the run has no stable name. Quote the key.")
            _require_stable(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_stable(item, f"{key}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}={value}: a run cannot be named by a number that is not finite. Give a finite one.")
    elif not (value is None or isinstance(value, str | bool | int | float)):
        raise UserError(
            f"{key}={value!r}: a {type(value).__name__} has no stable text to name the run by. "
            "Use text, numbers, true, false, null, lists and mappings."
        )
