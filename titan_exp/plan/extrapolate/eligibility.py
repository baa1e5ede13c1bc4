"""Eligibility for extrapolation: identical layers and micro-batches, and a speedup. Imports no torch."""

from dataclasses import replace

from titan_exp.config.groups.activation_checkpoint import ActivationCheckpointConfig
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.axes import regroups_experts
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec

SAMPLED_LAYERS = 5
"""Like layers of the small model; the third is repeated, because blocks prefetch and reduce for their neighbours. Where
kinds of layers alternate, a period of them is repeated."""
SAMPLED_MICRO_BATCHES = 3
"""Micro-batches of the small model's step: first, repeated, last."""
MAX_DISTINCT_LAYERS = 4
"""Maximum number of first layers that differ from the rest, such as dense ones before those with experts: the small
model has them all."""
MAX_PERIOD = 4
"""Maximum number of layers after which their kinds repeat."""
MIN_SPEEDUP = 2
"""Minimum ratio of block passes in the full step to block passes in the samples."""
SAMPLED_BLOCKS = 8
"""Blocks of the sampled pipeline rank."""


def unsupported_reason(experiment: Experiment) -> str | None:
    """Reason against extrapolating a run, or None."""
    parallelism, fp32 = experiment.parallelism, experiment.training.fp32_modules
    spec = model_spec(experiment.model)
    reasons = {
        "a model without a spec may have different layers": spec is None,
        "layers differ": spec is not None and (spec.distinct_layers > MAX_DISTINCT_LAYERS or spec.period > MAX_PERIOD),
        "quantization may treat layers differently": experiment.quantization.recipe != "none",
        "layers share compiled code": experiment.compile.enabled,
        "training.fp32_modules may name single layers": any(
            not pattern.startswith("blocks.*") and ("*" in pattern or "?" in pattern or "blocks" in pattern)
            for pattern in fp32
        ),
        f"optimizer.name={experiment.optimizer.name} may treat layers differently": (
            not experiment.optimizer.is_homogeneous
        ),
        "optimizer.groups may treat layers differently": bool(experiment.optimizer.groups),
        "parallelism.prefetch_blocks spans several layers": parallelism.prefetch_blocks > 1,
        "parallelism.cpu_offload": parallelism.cpu_offload,
    }
    layout, (distinct, period) = ResolvedLayout.of(experiment), repetition(experiment)
    if distinct or period > 1:
        few = sampled_layers(experiment) if parallelism.pp == 1 else distinct + period
        reasons["too few layers are alike"] = layout.layer_counts[0] < few
    if parallelism.pp > 1:
        reasons |= {
            "a stage begins within a period of layers": any(count % period for count in layout.layer_counts),
            f"{parallelism.pp_schedule} computes weight gradients of a whole stage at once": (layout.splits_backward),
            "the first and the last stage share the embedding": (
                spec is not None and bool(spec.tied or spec.mtp_layers)
            ),
            "parameters are gathered again for each micro-batch": layout.reshard_policy != "never",
            "a step has several passes through the pipeline": (
                layout.pipeline_microbatches != layout.gradient_accumulation
            ),
            "a stage has no layers": min(layout.layer_counts) < 1,
            "every stage reads document ids": experiment.data.document_mask,
        }
    return next((reason for reason, holds in reasons.items() if holds), None)


def repetition(experiment: Experiment) -> tuple[int, int]:
    """Number of first layers that do not repeat, and of layers after which the others do."""
    spec = model_spec(experiment.model)
    return (0, 1) if spec is None else (spec.distinct_layers, spec.period)


def sampled_edge(experiment: Experiment) -> int:
    """Blocks at each end of a sampled stage that are not repeated.

    An FSDP unit of experts in a block is gathered a block earlier, and its buffer freed in the next block with experts.
    """
    spec = model_spec(experiment.model)
    if experiment.parallelism.pp == 1 or spec is None:
        return 2
    if not spec.has_experts or not regroups_experts(experiment.parallelism):
        return 1
    return 1 + spec.period // max(1, sum(layer.router is not None for layer in spec.layers[-spec.period :]))


def sampled_layers(experiment: Experiment) -> int:
    """Layers of the small model without a pipeline: its last one is of the same kind as the run's."""
    distinct, period = repetition(experiment)
    few = distinct + SAMPLED_LAYERS - 1 + period
    return few + (experiment.model.layers - few) % period


def sampled_stages(experiment: Experiment) -> tuple[int, int, int]:
    """Layers of a sampled pipeline's first, middle and last stage, in whole periods.

    A first stage with fewer layers is sampled as it is.
    """
    (distinct, period), edge = repetition(experiment), sampled_edge(experiment)
    ends, middle = (-(-few // period) * period for few in (2 * edge, 2 * edge + period))
    first = ResolvedLayout.of(experiment).layer_counts[0]
    return min(distinct + ends, first) if distinct else ends, middle, ends


def recompute_modes(
    checkpointing: ActivationCheckpointConfig, layers: int
) -> tuple[list[ActivationCheckpointConfig], list[int]]:
    """Activation checkpointing of different blocks, and the index of each block's."""
    automatic = checkpointing.automatic
    if automatic is not None and automatic.every > 1 and automatic.more is None:
        every, modes = automatic.every, [checkpointing.with_blocks_alike(more=more) for more in (False, True)]
    elif checkpointing.mode == "every_n":
        every, modes = checkpointing.every, [replace(checkpointing, mode="none"), replace(checkpointing, mode="full")]
    else:
        return [checkpointing], [0] * layers
    return modes, [int((number + 1) % every == 0) for number in range(layers)]


def is_worthwhile(layout: ResolvedLayout, checkpointing: ActivationCheckpointConfig, ranks: int) -> bool:
    """True if extrapolating `ranks` pipeline ranks is faster than tracing them, judged by block passes."""
    layers, micro_batches = layout.layers, layout.gradient_accumulation
    ways = len(recompute_modes(checkpointing, layers)[0])
    if layout.parallelism.pp == 1:
        few = ways * SAMPLED_LAYERS * (1 + min(micro_batches, SAMPLED_MICRO_BATCHES))
        return layers >= SAMPLED_LAYERS and layers * (1 + micro_batches) > MIN_SPEEDUP * few
    lone = len({count == 1 for count in layout.layer_counts})
    per_rank = layers / layout.parallelism.pp
    # Each of its steps has two passes.
    return ranks * per_rank * 2 * micro_batches > MIN_SPEEDUP * ways * lone * SAMPLED_BLOCKS * 4
