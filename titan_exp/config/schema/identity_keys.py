"""Which keys change what is computed: runs are named by them, and compared by them."""

from collections.abc import Iterable

NOT_IN_RUN_ID = {
    "experiment.name": "the folder above the run's",
    "experiment.tags": "words for people",
    "experiment.notes": "words for people",
    "model.name": "what tables call the model; its shape is in the other keys",
    "paths": "where files lie",
    "tracking": "where numbers go and how often; training does not look at them",
    "profiling": "watches some steps and changes none",
    "plan": "looks at the run before it starts",
    "cluster": "where processes run; how many there are is in `parallelism`",
    "checkpoint": "how often state is saved; a resumed run equals an undisturbed one (but see WITH_EFFECT)",
    "data.prefetch": "how early batches are ready, not which",
    "data.preview": "looks at the data and trains nothing",
    "training.gc_every": "when Python tidies up",
}
"""Keys that change nothing that is computed, each with the reason. A group stands for all of its keys."""

LAYOUT = {
    "parallelism": "how the same mathematics is spread over processes",
    "compile": "which code runs the same operations",
    "activation_checkpoint": "what is kept and what is computed again",
    "training.micro_batch_size": "how the global batch is cut",
    "training.loss_chunk_tokens": "how many logits are held at a time",
    "model.attention_backend": "which kernel computes attention",
    "quantization.emulate": "whether instructions of the device compute the same products",
    "quantization.float8_all_gather": "whether weights are rounded before or after they are gathered",
    "quantization.precomputed_scales": "when the same scales are computed",
    "quantization.fused_casts": "whether the same casts are made in one pass",
}
"""Keys that say how it is computed and change rounding at most."""

IN_RUN_ID_WHEN_SET = ("checkpoint.initial", "checkpoint.initial_exclude")
"""Keys of such a group that count where the first of them is not null: the weights that training begins with."""


def is_among(key: str, keys: Iterable[str]) -> bool:
    """Whether a dotted key is one of `keys`, or in a group that is."""
    return any(key == other or key.startswith(f"{other}.") for other in keys)


def has_effect(key: str) -> bool:
    """Whether a key with these values may change what is computed, or how."""
    return is_among(key, IN_RUN_ID_WHEN_SET) or not is_among(key, NOT_IN_RUN_ID)
