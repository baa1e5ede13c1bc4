"""Eligibility for extrapolation: layers and micro-batches that are alike, and a speedup. Imports no torch.

Equal layers have the same spec, quantized linears, fp32 modules and parameter groups.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import NamedTuple

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.parallelism import ActivationCheckpointConfig
from titan_exp.config.layout.axes import regroups_experts
from titan_exp.config.layout.pipeline_schedules import Schedule, is_file, read_schedule
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec, mtp_depth, parameter_roles
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec

MAX_DISTINCT_LAYERS, MAX_PERIOD, MAX_LAST_LAYERS = 4, 4, 4
"""Limits: the most first layers that may differ from the rest (dense layers before layers with experts), the longest
period in which layers repeat, and the most last layers that may differ (unquantized ones)."""


class Repetition(NamedTuple):
    """Repetition of a model's layers; the sum of `distinct` and `period` is minimal."""

    distinct: int  # number of first layers that do not repeat
    period: int  # period with which the others do
    last: int = 0  # number of last layers that do not repeat


_REPETITIONS: dict[str, Repetition] = {}
"""Memoized repetitions by the values that they depend on, since a search asks for those of thousands of layouts."""


@dataclass(frozen=True)
class LayerKind:
    """Everything that distinguishes a layer from others."""

    layer: LayerSpec
    unquantized: tuple[str, ...] = ()  # linears in high precision, by their name in the block
    fp32: tuple[str, ...] = ()
    """Modules of `training.fp32_modules`, by their name in the block; empty for the block itself."""
    groups: tuple[tuple[str, str], ...] = ()
    """Parameters in `optimizer.groups`, by their name in the block, and the group of each."""


def repetition(experiment: Experiment) -> Repetition:
    """Repetition of a run's layers."""
    spec = model_spec(experiment.model)
    if spec is None:
        return Repetition(0, 1)
    fp32 = experiment.training.fp32_modules
    key = repr((experiment.model, experiment.quantization, fp32, experiment.optimizer.groups))
    if key not in _REPETITIONS:
        _REPETITIONS[key] = _repetition_before_last(_layer_kinds(experiment, spec)[: len(spec.layers)])
    return _REPETITIONS[key]


def last_blocks(experiment: Experiment) -> int:
    """Number of last blocks that do not repeat: layers and modules of multi-token prediction."""
    return repetition(experiment).last + mtp_depth(experiment.model)


def with_layers(experiment: Experiment, layers: int) -> Experiment:
    """Variant of a run with fewer layers of the same kinds: quantized, in fp32 and in parameter groups likewise."""
    spec, (distinct, period, last) = model_spec(experiment.model), repetition(experiment)
    small = replace(experiment, model=replace(experiment.model, layers=layers))
    if spec is None:
        return small
    kinds, numbers = _layer_kinds(experiment, spec), range(layers - last)
    first = (number if number < distinct else distinct + (number - distinct) % period for number in numbers)
    further = len(kinds) - len(spec.mtp_layers) - last
    numbered = list(enumerate([*(kinds[number] for number in first), *kinds[further:]]))
    quantization = replace(
        experiment.quantization,
        filter=[f"blocks.{number}.{name}" for number, kind in numbered for name in kind.unquantized],
        high_precision_first=0,
        high_precision_last=0,
    )
    outside = _modules(name for name in spec.shapes if not name.startswith("blocks."))
    modules = [
        *_matching(["blocks", *outside], "", experiment.training.fp32_modules),
        *(f"blocks.{number}.{name}".rstrip(".") for number, kind in numbered for name in kind.fp32),
    ]
    grouped = [
        *((name, group) for name, group in _groups(experiment, spec).items() if not name.startswith("blocks.")),
        *((f"blocks.{number}.{name}", group) for number, kind in numbered for name, group in kind.groups),
    ]
    groups = {
        name: replace(group, match=tuple(parameter for parameter, of in grouped if of == name))
        for name, group in experiment.optimizer.groups.items()
    }
    return replace(
        small,
        quantization=quantization,
        training=replace(small.training, fp32_modules=tuple(modules)),
        optimizer=replace(experiment.optimizer, groups=groups),
    )


def small_run(
    experiment: Experiment,
    layers: Sequence[int],
    micro_batches: int,
    checkpointing: ActivationCheckpointConfig,
    *,
    pp: int = 1,
    schedule: str = "1F1B",
) -> Experiment:
    """Variant of a run with the given layers per stage, micro-batches, pipeline and activation checkpointing."""
    layout, parallelism = ResolvedLayout.of(experiment), experiment.parallelism
    size, batch = layout.micro_batch_size, layout.dp_degree * layout.micro_batch_size * micro_batches
    if pp > 1:
        parallelism = replace(
            parallelism,
            pp=pp,
            pp_schedule=schedule,
            pp_microbatches=None,
            pp_layers=tuple(layers),
            pp_layers_per_stage=None,
            pp_first_stage_less=0,
            pp_last_stage_less=0,
        )
    small = with_layers(experiment, sum(layers))
    return replace(
        small,
        training=replace(small.training, global_batch_size=batch, micro_batch_size=size, batch_ramp=()),
        activation_checkpoint=checkpointing,
        parallelism=parallelism,
    )


def _layer_kinds(experiment: Experiment, spec: ModelSpec) -> list[LayerKind]:
    quantization, patterns = experiment.quantization, experiment.training.fp32_modules
    kinds, grouped = [], _groups(experiment, spec)
    for number, layer in enumerate(spec.blocks):
        unquantized = tuple(
            linear.name
            for linear in (layer.linears if quantization.recipe != "none" else ())
            if not quantization.quantizes(
                f"blocks.{number}.{linear.name}", linear.inputs, linear.outputs, layers=len(spec.blocks)
            )
        )
        fp32 = _matching(["", *_modules(layer.shapes)], f"blocks.{number}.", patterns)
        names = ((name, grouped.get(f"blocks.{number}.{name}")) for name in layer.shapes)
        groups = tuple((name, group) for name, group in names if group is not None)
        kinds.append(LayerKind(layer, unquantized, fp32, groups))
    return kinds


def _groups(experiment: Experiment, spec: ModelSpec) -> dict[str, str]:
    groups = experiment.optimizer.groups
    roles = parameter_roles(spec).items() if groups else ()
    found = ((name, [key for key, group in groups.items() if group.has(name, role)]) for name, role in roles)
    return {name: keys[0] for name, keys in found if keys}


def _matching(names: Iterable[str], prefix: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Names that match a pattern after `prefix`."""
    full = ((name, f"{prefix}{name}".rstrip(".")) for name in names if patterns)
    return tuple(name for name, path in full if any(fnmatchcase(path, pattern) for pattern in patterns))


def _modules(parameters: Iterable[str]) -> list[str]:
    """Modules that hold these parameters, enclosing modules included."""
    paths = (accumulate(name.split(".")[:-1], lambda outer, inner: f"{outer}.{inner}") for name in parameters)
    return list(dict.fromkeys(module for path in paths for module in path))


def _repetition_before_last(kinds: Sequence[LayerKind]) -> Repetition:
    """Repetition before the fewest last layers without which layers repeat soon; 0 if their specs do not repeat."""
    distinct, period = _repetition([LayerKind(kind.layer) for kind in kinds])
    for last in range(min(MAX_LAST_LAYERS, len(kinds) - 1) + 1):
        found = _repetition(kinds[: len(kinds) - last])
        is_spec_repeated = found[0] >= distinct and found[1] % period == 0
        if found[0] <= MAX_DISTINCT_LAYERS and found[1] <= MAX_PERIOD and (not last or is_spec_repeated):
            return Repetition(*found, last)
    return Repetition(*_repetition(kinds))


def _repetition(kinds: Sequence[LayerKind]) -> tuple[int, int]:
    numbers = {kind: number for number, kind in enumerate(kinds)}
    layers, found = [numbers[kind] for kind in kinds], (len(kinds), 1)
    for period in range(1, len(layers) + 1):
        if period >= sum(found):
            break
        differing = (
            number for number in range(len(layers) - period, 0, -1) if layers[number - 1] != layers[number + period - 1]
        )
        found = min(found, (next(differing, 0), period), key=sum)
    return found


SAMPLED_LAYERS = 5
"""Number of equal layers in the small model. The third is repeated, because blocks prefetch and reduce for their
neighbours. Where kinds of layers alternate, a whole period is repeated."""
SAMPLED_MICRO_BATCHES = 3  # micro-batches of the small model's step: first, repeated, last
MIN_SPEEDUP = 2  # minimum ratio of block passes in the full step to those in the samples
SAMPLED_BLOCKS = 8


def unsupported_reason(experiment: Experiment) -> str | None:
    """Reason against extrapolating a run; None if it can be extrapolated."""
    parallelism, spec = experiment.parallelism, model_spec(experiment.model)
    layout, (distinct, period, last) = ResolvedLayout.of(experiment), repetition(experiment)
    alike = [*layout.layer_counts[:-1], layout.layer_counts[-1] - last]
    reasons = {
        "the layers of a model without a spec may differ": spec is None,
        "a captured pass keeps the gradients of all layers": experiment.compile.cuda_graphs,
        f"too many layers differ, by the model, quantization.filter, training.fp32_modules or optimizer.groups "
        f"(at most the first {MAX_DISTINCT_LAYERS} and the last {MAX_LAST_LAYERS} may, and the others repeat after at "
        f"most {MAX_PERIOD})": distinct > MAX_DISTINCT_LAYERS or period > MAX_PERIOD,
    }
    if distinct or last or period > 1 or parallelism.prefetch_blocks > 1:
        few = sampled_layers(experiment) if parallelism.pp == 1 else distinct
        reasons["too few layers are alike"] = layout.layer_counts[0] < few
    if parallelism.pp > 1:
        reasons |= {
            "parallelism.prefetch_blocks spans most of a stage": (
                parallelism.prefetch_blocks > 1 and min(alike) < 2 * sampled_edge(experiment)
            ),
            "a stage begins in the middle of a repeated group of layers": any(
                count % period for count in (alike[0] - distinct, *alike[1:])
            ),
            "a full backward pass lies between a stage's first input gradients and its first weight gradients": (
                is_file(parallelism.pp_schedule) and _splits_around_backward(read_schedule(parallelism.pp_schedule))
            ),
            "a stage after the first has no layers, or only last layers that differ": min(alike[1:]) < 1,
            "a rank has both copies of the embedding": (
                spec is not None
                and bool(spec.pipeline.copied)
                and layout.stage_placement[0] == layout.stage_placement[-1]
            ),
        }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _splits_around_backward(orders: Schedule) -> bool:
    """True if a full backward pass finds the gradients of compiled graphs allocated but not the other gradients."""
    begun: set[tuple[int, str]] = set()
    for action in (action for order in orders for action in order):
        if action.kind == "B" and (action.stage, "I") in begun and (action.stage, "W") not in begun:
            return True
        begun |= {(action.stage, kind) for kind in ("IW" if action.kind == "B" else action.kind)}
    return False


def sampled_edge(experiment: Experiment) -> int:
    """Blocks at each end of a sampled stage that are not repeated.

    Blocks prefetch and reduce for their neighbours; a tensor that all blocks of one kind save is released by the first.
    A block's FSDP unit of experts is gathered a block earlier, and its buffer is freed in the next block with experts
    that gathers, so that in a pipeline a forward pass after another finds the last block gathered.
    """
    parallelism, spec, period = experiment.parallelism, model_spec(experiment.model), repetition(experiment).period
    # Gradients are reduced in the blocks of the last micro-batch, or parameters freed, behind the block's own pass.
    policy = ResolvedLayout.of(experiment).reshard_policy
    behind = parallelism.pp == 1 or policy != "never"
    edge = parallelism.prefetch_blocks + behind
    if spec is not None and spec.has_experts and regroups_experts(parallelism):
        with_experts = sum(any(linear.experts > 1 for linear in layer.linears) for layer in spec.layers[-period:])
        skipped = parallelism.pp > 1 and policy == "all_but_last"
        edge = max(edge, parallelism.prefetch_blocks + (1 + skipped) * (period // max(1, with_experts)))
    if spec is not None and spec.pipeline.extra_tokens:
        # The conditioning's gradient is summed over blocks. A block's own part has the sum's size, and with two sampled
        # blocks we cannot tell which one a release means.
        edge = max(edge, 2)
    return max(edge, period)


def sampled_layers(experiment: Experiment) -> int:
    """Number of layers in the small model without a pipeline; its last layer is of the same kind as the run's."""
    distinct, period, last = repetition(experiment)
    few = distinct + 2 * sampled_edge(experiment) + period + last
    return few + (experiment.model.layers - few) % period


def sampled_stages(experiment: Experiment, size: int | None) -> tuple[int, int, int]:
    """Layers of a sampled pipeline's first, middle and last stage, in whole periods, without the last layers that do
    not repeat. `size` comes from `stage_sizes`."""
    (distinct, period, _), edge = repetition(experiment), sampled_edge(experiment)
    if size is not None:
        return distinct + size, max(size, period), size
    ends, middle = (-(-few // period) * period for few in (2 * edge, 2 * edge + period))
    # A first stage does not split its backward pass, so other stages' blocks differ from its own.
    first = middle if ResolvedLayout.of(experiment).splits_backward else ends
    return distinct + first, middle, ends


def stage_sizes(experiment: Experiment) -> list[int | None]:
    """Sample size of each stage: its own number of equal layers if that is too small for a larger sample, else None."""
    (distinct, _, last), edge = repetition(experiment), sampled_edge(experiment)
    if experiment.parallelism.pp == 1:
        return [None]
    counts = list(ResolvedLayout.of(experiment).layer_counts)
    counts[0] -= distinct
    counts[-1] -= last
    return [alike if alike < 2 * edge else None for alike in counts]


def recompute_modes(
    checkpointing: ActivationCheckpointConfig, layers: int
) -> tuple[list[ActivationCheckpointConfig], list[int]]:
    """Distinct activation checkpointing configurations of the blocks, and the index of each block's."""
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
    # Samples have up to three micro-batches; stages whose first backward pass is split need samples of their own.
    passes = 6 if layout.splits_backward else 3 if layout.reshard_policy != "never" else 2
    return ranks * per_rank * 2 * micro_batches > MIN_SPEEDUP * ways * lone * SAMPLED_BLOCKS * 2 * passes
