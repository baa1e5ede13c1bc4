"""Kinds of layers, and small variants of a run with the same kinds. Equal layers have the same spec, quantized linears,
fp32 modules and parameter groups. Imports no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import accumulate

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.parallelism import ActivationCheckpointConfig
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec, mtp_depth, parameter_roles
from titan_exp.models.spec.model_spec import LayerSpec, ModelSpec

MAX_DISTINCT_LAYERS, MAX_PERIOD, MAX_LAST_LAYERS = 4, 4, 4
"""Most first layers that may differ from the rest, e.g. dense ones before layers with experts, layers after which the
others repeat, and last layers that may differ, e.g. unquantized ones."""
_REPETITIONS: dict[str, tuple[int, int, int]] = {}
"""Memoized repetitions by the values that they depend on: a search asks for those of thousands of layouts."""


@dataclass(frozen=True)
class LayerKind:
    """Everything that distinguishes a layer from others."""

    layer: LayerSpec
    """Shapes and attention."""
    unquantized: tuple[str, ...] = ()
    """Linears in high precision, by their name in the block."""
    fp32: tuple[str, ...] = ()
    """Modules of `training.fp32_modules`, by their name in the block; empty for the block itself."""
    groups: tuple[tuple[str, str], ...] = ()
    """Parameters in `optimizer.groups`, by their name in the block, and the group of each."""


def repetition(experiment: Experiment) -> tuple[int, int]:
    """Number of first layers that do not repeat, and of layers after which the others do; their sum is minimal."""
    return _found(experiment)[:2]


def last_layers(experiment: Experiment) -> int:
    """Number of last layers that do not repeat."""
    return _found(experiment)[2]


def last_blocks(experiment: Experiment) -> int:
    """Number of last blocks that do not repeat: layers, and modules of multi-token prediction."""
    return last_layers(experiment) + mtp_depth(experiment.model)


def _found(experiment: Experiment) -> tuple[int, int, int]:
    spec = model_spec(experiment.model)
    if spec is None:
        return 0, 1, 0
    fp32 = experiment.training.fp32_modules
    key = repr((experiment.model, experiment.quantization, fp32, experiment.optimizer.groups))
    if key not in _REPETITIONS:
        _REPETITIONS[key] = _repetition_before_last(_layer_kinds(experiment, spec)[: len(spec.layers)])
    return _REPETITIONS[key]


def with_layers(experiment: Experiment, layers: int) -> Experiment:
    """Variant of a run with fewer layers of the same kinds: the same modules are quantized, computed in fp32 and in
    parameter groups."""
    spec, (distinct, period) = model_spec(experiment.model), repetition(experiment)
    small = replace(experiment, model=replace(experiment.model, layers=layers))
    if spec is None:
        return small
    kinds, last = _layer_kinds(experiment, spec), last_layers(experiment)
    numbers = range(layers - last)
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
    """Kind of each block, modules of multi-token prediction last."""
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
    """Group of each parameter that is in one of `optimizer.groups`."""
    groups = experiment.optimizer.groups
    roles = parameter_roles(spec).items() if groups else ()
    found = ((name, [key for key, group in groups.items() if group.has(name, role)]) for name, role in roles)
    return {name: keys[0] for name, keys in found if keys}


def _matching(names: Iterable[str], prefix: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Names that match a pattern after `prefix`."""
    full = ((name, f"{prefix}{name}".rstrip(".")) for name in names if patterns)
    return tuple(name for name, path in full if any(fnmatchcase(path, pattern) for pattern in patterns))


def _modules(parameters: Iterable[str]) -> list[str]:
    """Modules that hold these parameters, the modules around them included."""
    paths = (accumulate(name.split(".")[:-1], lambda outer, inner: f"{outer}.{inner}") for name in parameters)
    return list(dict.fromkeys(module for path in paths for module in path))


def _repetition_before_last(kinds: Sequence[LayerKind]) -> tuple[int, int, int]:
    """Repetition, and the fewest last layers without which layers repeat soon; 0 if their specs do not."""
    distinct, period = _repetition([LayerKind(kind.layer) for kind in kinds])
    for last in range(min(MAX_LAST_LAYERS, len(kinds) - 1) + 1):
        found = _repetition(kinds[: len(kinds) - last])
        is_spec_repeated = found[0] >= distinct and found[1] % period == 0
        if found[0] <= MAX_DISTINCT_LAYERS and found[1] <= MAX_PERIOD and (not last or is_spec_repeated):
            return *found, last
    return *_repetition(kinds), 0


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
