"""Whether a run's layers and micro-batches are alike, so that tracing a few tells of all. Imports no torch."""

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec

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
    spec = model_spec(experiment.model)
    reasons = {
        "a plain class does not say that its layers are alike": spec is None,
        "layers differ": spec is not None and not spec.is_homogeneous,
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
    layout = ResolvedLayout.of(experiment)
    if parallelism.pp > 1:
        reasons |= {
            f"{parallelism.pp_schedule} computes the gradients of weights later, whose layers cannot be told apart": (
                layout.splits_backward
            ),
            "the first and the last stage share a weight": spec is not None and spec.tied,
            "parameters are gathered anew for each micro-batch": layout.reshard_policy != "never",
            "there are several passes through the pipeline": (
                layout.pipeline_microbatches != layout.gradient_accumulation
            ),
            "a stage has no layers": min(layout.layer_counts) < 1,
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
    layout = ResolvedLayout.of(experiment)
    ways, micro_batches = len(recompute_modes(experiment)[0]), layout.gradient_accumulation
    layers = experiment.model.layers
    if experiment.parallelism.pp == 1:
        few = ways * SAMPLED_LAYERS * (1 + min(micro_batches, SAMPLED_MICRO_BATCHES))
        return layers >= SAMPLED_LAYERS and layers * (1 + micro_batches) > MIN_SPEEDUP * few
    lone = len({count == 1 for count in layout.layer_counts})
    per_rank = layers / experiment.parallelism.pp
    # Two passes in each of its steps.
    return ranks * per_rank * 2 * micro_batches > MIN_SPEEDUP * ways * lone * SAMPLED_BLOCKS * 4
