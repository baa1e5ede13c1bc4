"""Identity of a run, and differences between configurations."""

from collections.abc import Collection, Mapping
from typing import Any

from titan_exp.config.errors.user_error import shown
from titan_exp.config.extension import added_keys, extensions
from titan_exp.config.schema.foreign_code import sources

NOT_IN_RUN_ID = {
    "experiment.name": "names the folder above the run's",
    "experiment.tags": "labels",
    "experiment.notes": "a comment",
    "model.name": "label of the model in tables; its shape is in the other keys",
    "paths": "where files lie",
    "tracking": "where metrics go and how often; training does not read them",
    "profiling": "observes some steps and changes none",
    "plan": "checks the run before it starts",
    "cluster": "where processes run; their number is in `parallelism`",
    "checkpoint": "when state is saved; a resumed run equals an uninterrupted one (less IN_RUN_ID)",
    "data.prefetch": "how early batches are ready",
    "data.preview": "prints data and trains nothing",
    "training.gc_every": "when Python collects garbage",
}
"""Keys without effect on results, each with the reason. A group covers all of its keys."""
NOT_IN_RUN_ID |= {key: reason for one in extensions().values() for key, reason in one.not_in_run_id.items()}

IN_RUN_ID = (
    "checkpoint.initial",
    "checkpoint.initial_exclude",
    "checkpoint.continue_from",
    "checkpoint.continue_step",
    "checkpoint.continue_data",
)
"""Exceptions in these groups that affect results: the initial state."""

LAYOUT = {
    "parallelism": "how the same mathematics is spread over processes",
    "compile": "which code runs the same operations",
    "activation_checkpoint": "what is kept and what is recomputed",
    "training.micro_batch_size": "how the global batch is split",
    "training.loss_chunk_tokens": "how many logits are held at a time",
    "model.attention_backend": "which kernel computes attention",
    "optimizer.implementation": "which kernel computes the same update",
    "quantization.emulate": "whether the device's instructions compute the same matmuls",
    "quantization.float8_all_gather": "whether weights are rounded before or after they are gathered",
    "quantization.precomputed_scales": "when the same scales are computed",
    "quantization.fused_casts": "whether the same casts are made in one pass",
}
"""Layout keys, which affect at most rounding. They are in the run id, not in the experiment id."""

_MODE = "activation_checkpoint.mode"

COUNTS_BESIDE: dict[str, tuple[str, tuple[object, ...]]] = {
    "quantization": ("quantization.recipe", ("none",)),
    "grad_clip.max_value": ("grad_clip.mode", ("norm", "adagc")),
    "grad_clip.relative": ("grad_clip.mode", ("norm", "value")),
    "grad_clip.decay": ("grad_clip.mode", ("norm", "value")),
    "grad_clip.warmup_steps": ("grad_clip.mode", ("norm", "value")),
    "weight_average.decay": ("weight_average.mode", ("none", "tail")),
    "weight_average.steps": ("weight_average.mode", ("none", "ema")),
    "checkpoint.initial_exclude": ("checkpoint.initial", (None,)),
    "checkpoint.continue_step": ("checkpoint.continue_from", (None,)),
    "checkpoint.continue_data": ("checkpoint.continue_from", (None,)),
    "activation_checkpoint.every": (_MODE, ("none", "full", "selective", "budget")),
    "activation_checkpoint.save": (_MODE, ("none", "full", "every_n", "budget")),
    "activation_checkpoint.budget": (_MODE, ("none", "full", "every_n")),
    "compile.components": ("compile.enabled", (False,)),
    "compile.backend": ("compile.enabled", (False,)),
    "compile.autotune_gemms": ("compile.enabled", (False,)),
    "parallelism.sequence_parallel": ("parallelism.tp", (1,)),
    "parallelism.loss_parallel": ("parallelism.tp", (1,)),
    "parallelism.pp_schedule": ("parallelism.pp", (1,)),
    "parallelism.cp_method": ("parallelism.cp", (1,)),
    "parallelism.cp_ulysses": ("parallelism.cp", (1,)),
    "parallelism.token_exchange": ("parallelism.ep", (1,)),
}
"""Keys or groups without effect while another key has one of the given values. A new default of an idle key changes no
id: a mode's own keys belong here, as `activation_checkpoint.budget` does."""


COUNTS_BESIDE |= {key: beside for one in extensions().values() for key, beside in one.idle.items()}
COUNTS_BESIDE |= {
    f"data.{key}": ("data.source", tuple(name for name, one in sources().items() if key not in one.reads))
    for key in added_keys("data")
    if any(key in one.reads for one in sources().values())
}


def idle_keys(values: Mapping[str, object]) -> list[str]:
    """Keys and groups of `COUNTS_BESIDE` without effect among these values by dotted key."""
    return [key for key, (switch, idle) in COUNTS_BESIDE.items() if switch in values and values[switch] in idle]


def is_among(key: str, keys: Collection[str]) -> bool:
    """True if a dotted key is in `keys`, or in a group in `keys`."""
    while key and key not in keys:
        key = key.rpartition(".")[0]
    return bool(key)


def has_effect(key: str) -> bool:
    """True if a key may affect results or rounding."""
    return is_among(key, IN_RUN_ID) or not is_among(key, NOT_IN_RUN_ID)


LISTED = 20
"""Maximum number of listed keys."""


def differences(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> list[str]:
    """Lines for the keys that differ, indented and preceded by a line break; empty if `old` is unknown. A key that an
    older version lacks does not differ if it is empty."""
    if old is None:
        return []
    before, after = flatten(old), flatten(new)
    changed = [
        f"\n  {key}: {_value(before, key)} → {_value(after, key)}"
        for key in after | before
        if key not in after or (before[key] != after[key] if key in before else after[key] not in ({}, [], ()))
    ]
    more = len(changed) - LISTED
    return changed if more <= 0 else [*changed[:LISTED], f"\n  and {more} more"]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries to dotted keys; an empty dictionary is a value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def same_value(value: Any, other: Any) -> bool:
    """True if two values of a configuration are the same: 1 and 1.0, a number and its text, not 1 and true."""
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(same_value, value, other))
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return value == other or (isinstance(value, str) != isinstance(other, str) and str(value) == str(other))


def _value(values: Mapping[str, Any], key: str) -> str:
    return shown(values[key]) if key in values else "not there"
