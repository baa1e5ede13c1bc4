"""Eligibility for extrapolation: identical layers and micro-batches, and a speedup. Imports no torch."""

from dataclasses import replace

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.parallelism import ActivationCheckpointConfig
from titan_exp.config.layout.axes import regroups_experts
from titan_exp.config.layout.pipeline_schedules import Schedule, is_file, read_schedule
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan.extrapolate.layer_kinds import (
    MAX_DISTINCT_LAYERS,
    MAX_LAST_LAYERS,
    MAX_PERIOD,
    last_layers,
    repetition,
)

SAMPLED_LAYERS = 5
"""Like layers of the small model; the third is repeated, because blocks prefetch and reduce for their neighbours. Where
kinds of layers alternate, a period of them is repeated."""
SAMPLED_MICRO_BATCHES = 3
"""Micro-batches of the small model's step: first, repeated, last."""
MIN_SPEEDUP = 2
"""Minimum ratio of block passes in the full step to block passes in the samples."""
SAMPLED_BLOCKS = 8
"""Blocks of the sampled pipeline rank."""


def unsupported_reason(experiment: Experiment) -> str | None:
    """Reason against extrapolating a run, or None."""
    parallelism, spec = experiment.parallelism, model_spec(experiment.model)
    layout, (distinct, period), last = ResolvedLayout.of(experiment), repetition(experiment), last_layers(experiment)
    alike = [*layout.layer_counts[:-1], layout.layer_counts[-1] - last]
    reasons = {
        "a model without a spec may have different layers": spec is None,
        "a captured pass keeps the gradients of all layers": experiment.compile.cuda_graphs,
        f"layers differ beyond the first {MAX_DISTINCT_LAYERS} and periods of {MAX_PERIOD}, in the model or by "
        f"quantization.filter, training.fp32_modules or optimizer.groups; the last {MAX_LAST_LAYERS} may differ too": (
            distinct > MAX_DISTINCT_LAYERS or period > MAX_PERIOD
        ),
    }
    if distinct or last or period > 1 or parallelism.prefetch_blocks > 1:
        few = sampled_layers(experiment) if parallelism.pp == 1 else distinct
        reasons["too few layers are alike"] = layout.layer_counts[0] < few
    if parallelism.pp > 1:
        reasons |= {
            "parallelism.prefetch_blocks spans most of a stage": (
                parallelism.prefetch_blocks > 1 and min(alike) < 2 * sampled_edge(experiment)
            ),
            "a stage begins within a period of layers": any(
                count % period for count in (alike[0] - distinct, *alike[1:])
            ),
            "a full backward pass lies between a stage's first input gradients and its first weight gradients": (
                is_file(parallelism.pp_schedule) and _splits_around_backward(read_schedule(parallelism.pp_schedule))
            ),
            "a stage behind the first has no layers, or none but last ones that differ": min(alike[1:]) < 1,
            "a rank has both copies of the embedding": (
                spec is not None
                and bool(spec.pipeline.copied)
                and layout.stage_placement[0] == layout.stage_placement[-1]
            ),
        }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _splits_around_backward(orders: Schedule) -> bool:
    """True if a full backward pass finds gradients of compiled graphs allocated, and others not."""
    begun: set[tuple[int, str]] = set()
    for action in (action for order in orders for action in order):
        if action.kind == "B" and (action.stage, "I") in begun and (action.stage, "W") not in begun:
            return True
        begun |= {(action.stage, kind) for kind in ("IW" if action.kind == "B" else action.kind)}
    return False


def sampled_edge(experiment: Experiment) -> int:
    """Blocks at each end of a sampled stage that are not repeated.

    Blocks prefetch and reduce for their neighbours; a tensor that all blocks of one kind save is released by the first.
    An FSDP unit of experts in a block is gathered a block earlier, and its buffer freed in the next block with experts
    that gathers: in a pipeline, a forward pass behind another finds the last block gathered.
    """
    parallelism, spec, (_, period) = experiment.parallelism, model_spec(experiment.model), repetition(experiment)
    # Gradients are reduced in the blocks of the last micro-batch, or parameters freed, behind the block's own pass.
    policy = ResolvedLayout.of(experiment).reshard_policy
    behind = parallelism.pp == 1 or policy != "never"
    edge = parallelism.prefetch_blocks + behind
    if spec is not None and spec.has_experts and regroups_experts(parallelism):
        with_experts = sum(layer.router is not None for layer in spec.layers[-period:])
        skipped = parallelism.pp > 1 and policy == "all_but_last"
        edge = max(edge, parallelism.prefetch_blocks + (1 + skipped) * (period // max(1, with_experts)))
    if spec is not None and spec.pipeline.extra_tokens:
        # The conditioning's gradient is summed over blocks. A block's own part has the sum's size, and of two sampled
        # blocks it cannot be said which one a release means.
        edge = max(edge, 2)
    return max(edge, period)


def sampled_layers(experiment: Experiment) -> int:
    """Layers of the small model without a pipeline: its last one is of the same kind as the run's."""
    (distinct, period), last = repetition(experiment), last_layers(experiment)
    few = distinct + 2 * sampled_edge(experiment) + period + last
    return few + (experiment.model.layers - few) % period


def sampled_stages(experiment: Experiment, size: int | None) -> tuple[int, int, int]:
    """Layers of a sampled pipeline's first, middle and last stage, in whole periods, without `last_layers`.

    `size` is as in `stage_sizes`.
    """
    (distinct, period), edge = repetition(experiment), sampled_edge(experiment)
    if size is not None:
        return distinct + size, max(size, period), size
    ends, middle = (-(-few // period) * period for few in (2 * edge, 2 * edge + period))
    # A first stage does not split its backward pass, so that others' blocks are not like its own.
    first = middle if ResolvedLayout.of(experiment).splits_backward else ends
    return distinct + first, middle, ends


def stage_sizes(experiment: Experiment) -> list[int | None]:
    """Size of each pipeline stage: its like layers if they are too few to be sampled by a larger stage, else None."""
    (distinct, _), edge = repetition(experiment), sampled_edge(experiment)
    if experiment.parallelism.pp == 1:
        return [None]
    counts = list(ResolvedLayout.of(experiment).layer_counts)
    counts[0] -= distinct
    counts[-1] -= last_layers(experiment)
    return [alike if alike < 2 * edge else None for alike in counts]


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
    lone = len({min(count, 2) for count in layout.layer_counts})
    per_rank = layers / layout.parallelism.pp
    # Samples have up to three micro-batches, and those of stages whose first backward pass is split are others.
    passes = 6 if layout.splits_backward else 3 if layout.reshard_policy != "never" else 2
    return ranks * per_rank * 2 * micro_batches > MIN_SPEEDUP * ways * lone * SAMPLED_BLOCKS * 2 * passes
