"""Whether a run's layers and micro-batches are alike, so that tracing a few tells of all. Imports no torch."""

from titan_exp.config.groups.builtins import ARCHITECTURES
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.layout import gradient_accumulation, pipeline_microbatches, reshard_policy
from titan_exp.config.layout.pipeline_stages import layer_counts, pipeline_splits_backward

SAMPLED_LAYERS = 5
"""Of the small model: the third is repeated, since what a block computes gathers and reduces for its neighbours."""
SAMPLED_MICRO_BATCHES = 3
"""Of its step: the first, one that is repeated, and the last."""
MIN_SPEEDUP = 2
"""How many times as many passes of blocks the whole must have as the small runs before these are traced instead."""
SAMPLED_BLOCKS = 8
"""Blocks of the pipeline rank that is traced for all."""


def unsupported_reason(experiment: Experiment) -> str | None:
    """Why layers or micro-batches of a run, its layout resolved, are not known to be alike; None where they are."""
    parallelism, fp32 = experiment.parallelism, experiment.training.fp32_modules
    reasons = {
        "only of the built-in model it is known that its layers are alike": experiment.model.architecture
        not in ARCHITECTURES,
        "quantization tells layers apart": experiment.quantization.recipe != "none",
        "what is compiled is shared by layers": experiment.compile.enabled,
        "training.fp32_modules may name single layers": any(
            not pattern.startswith("blocks.*") and ("*" in pattern or "?" in pattern or "blocks" in pattern)
            for pattern in fp32
        ),
        "an optimizer of one's own may tell layers apart": experiment.optimizer.name != "adamw",
        "parallelism.prefetch_blocks reaches over several layers": parallelism.prefetch_blocks > 1,
        "parallelism.cpu_offload": parallelism.cpu_offload,
    }
    if parallelism.pp > 1:
        reasons |= {
            f"{parallelism.pp_schedule} computes the gradients of weights later, whose layers cannot be told apart": (
                pipeline_splits_backward(parallelism)
            ),
            "the first and the last stage share a weight": experiment.model.tied_embeddings,
            "parameters are gathered anew for each micro-batch": reshard_policy(parallelism) != "never",
            "there are several passes through the pipeline": (
                pipeline_microbatches(experiment) != gradient_accumulation(experiment)
            ),
            "a stage has no layers": min(layer_counts(experiment)) < 1,
            "every stage looks at documents": experiment.data.document_mask,
        }
    return next((reason for reason, holds in reasons.items() if holds), None)


def recompute_modes(experiment: Experiment) -> tuple[list[str], list[int]]:
    """The ways in which blocks are recomputed, and which of them each block has."""
    checkpointing, layers = experiment.activation_checkpoint, experiment.model.layers
    if checkpointing.mode != "every_n":
        return [checkpointing.mode], [0] * layers
    return ["none", "full"], [int((number + 1) % checkpointing.every == 0) for number in range(layers)]


def is_worthwhile(experiment: Experiment, ranks: int) -> bool:
    """Whether putting the steps of so many pipeline ranks together is quicker than tracing them.

    Blocks passed through, forward and backward, in both steps of a trace, stand for the time of either.
    """
    ways, micro_batches = len(recompute_modes(experiment)[0]), gradient_accumulation(experiment)
    layers = experiment.model.layers
    if experiment.parallelism.pp == 1:
        few = ways * SAMPLED_LAYERS * (1 + min(micro_batches, SAMPLED_MICRO_BATCHES))
        return layers >= SAMPLED_LAYERS and layers * (1 + micro_batches) > MIN_SPEEDUP * few
    lone = len({count == 1 for count in layer_counts(experiment)})
    per_rank = layers / experiment.parallelism.pp
    # Two passes in each of its steps.
    return ranks * per_rank * 2 * micro_batches > MIN_SPEEDUP * ways * lone * SAMPLED_BLOCKS * 4
