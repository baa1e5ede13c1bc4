"""Run identity: keys outside the run id, layout keys, and keys whose effect depends on another key."""

from collections.abc import Iterable, Mapping

from titan_exp.config.extension import extensions
from titan_exp.config.schema.builtins import sources

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
    "semi_sync.groups": ("semi_sync.mode", ("none",)),
    "semi_sync.interval": ("semi_sync.mode", ("none",)),
    "semi_sync.outer_lr": ("semi_sync.mode", ("none", "local_sgd")),
    "semi_sync.outer_momentum": ("semi_sync.mode", ("none", "local_sgd")),
    "semi_sync.outer_nesterov": ("semi_sync.mode", ("none", "local_sgd")),
    "semi_sync.fragments": ("semi_sync.mode", ("none", "local_sgd", "diloco")),
    "semi_sync.fragment_pattern": ("semi_sync.mode", ("none", "local_sgd", "diloco")),
    "semi_sync.delay": ("semi_sync.mode", ("none", "local_sgd", "diloco")),
    "semi_sync.mixing": ("semi_sync.mode", ("none", "local_sgd", "diloco")),
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
    "data.images": ("data.source", tuple(source for source in sources() if source != "images")),
}
"""Keys or groups without effect while another key has one of the given values. A new default of an idle key changes no
id: a mode's own keys belong here, as `activation_checkpoint.budget` does."""


COUNTS_BESIDE |= {key: beside for one in extensions().values() for key, beside in one.idle.items()}


def idle_keys(values: Mapping[str, object]) -> list[str]:
    """Keys and groups of `COUNTS_BESIDE` without effect among these values by dotted key."""
    return [key for key, (switch, idle) in COUNTS_BESIDE.items() if switch in values and values[switch] in idle]


def is_among(key: str, keys: Iterable[str]) -> bool:
    """True if a dotted key is in `keys`, or in a group in `keys`."""
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def has_effect(key: str) -> bool:
    """True if a key may affect results or rounding."""
    return is_among(key, IN_RUN_ID) or not is_among(key, NOT_IN_RUN_ID)
