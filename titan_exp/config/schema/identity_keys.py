"""Run identity: keys outside the run id, layout keys, and keys whose effect depends on another key."""

from collections.abc import Iterable

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
    "quantization.emulate": "whether the device's instructions compute the same matmuls",
    "quantization.float8_all_gather": "whether weights are rounded before or after they are gathered",
    "quantization.precomputed_scales": "when the same scales are computed",
    "quantization.fused_casts": "whether the same casts are made in one pass",
}
"""Layout keys, which affect at most rounding. They are in the run id, not in the experiment id."""

COUNTS_BESIDE = {
    "quantization": "quantization.recipe",
    "checkpoint.initial_exclude": "checkpoint.initial",
    "checkpoint.continue_step": "checkpoint.continue_from",
    "checkpoint.continue_data": "checkpoint.continue_from",
}
"""Keys or groups without effect while another key has its default."""


def is_among(key: str, keys: Iterable[str]) -> bool:
    """True if a dotted key is in `keys`, or in a group in `keys`."""
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def has_effect(key: str) -> bool:
    """True if a key may affect results or rounding."""
    return is_among(key, IN_RUN_ID) or not is_among(key, NOT_IN_RUN_ID)
