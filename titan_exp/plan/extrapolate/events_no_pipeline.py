"""Allocation events of a step without a pipeline, from a sample of five layers and three micro-batches."""

from collections.abc import Iterator, Mapping, Sequence

from titan_exp.plan.extrapolate.allocation_events import (
    NOWHERE,
    EventComposer,
    ExtrapolationError,
    OptimizerStepEvents,
    SampleEvents,
    StepPosition,
)
from titan_exp.plan.extrapolate.eligibility import SAMPLED_LAYERS
from titan_exp.plan.extrapolate.layers_and_microbatches import ModelSample
from titan_exp.plan.trace.segments import MICRO_BATCH, OPTIMIZER_STEP, EventSegment

PROLOGUE, END = "prologue", "end"
"""Parts of a step before and after the passes."""


def model_events(sample: ModelSample) -> SampleEvents:
    """Assign the events of a sample to positions."""
    event_segments: dict[StepPosition, list[EventSegment]] = {}
    number = 0
    for step in (0, 1):
        part, block, micro = PROLOGUE, None, None
        number = -1
        for segment in sample.event_segments:
            if segment.step != step or part == END:
                continue
            if segment.label == OPTIMIZER_STEP:
                part, block, micro = END, None, None
                continue
            if segment.label == MICRO_BATCH:
                number += 1
                part, block, micro = "before", None, number
            elif ", block " in segment.label:
                part, _, at = segment.label.partition(", block ")
                block = int(at)
            elif part == "forward":
                part, block = "between", None
            elif part == "backward":
                part, block = "after", None
            stage = 0 if micro is not None else NOWHERE
            event_segments.setdefault(StepPosition(step, stage, micro, part, block), []).append(segment)
    return SampleEvents(event_segments, {0: SAMPLED_LAYERS}, number, sample.reduced_gradients)


def compose_no_pipeline(
    samples: Sequence[SampleEvents],
    modes: Sequence[int],
    micro_batches: int,
    optimizer_step: OptimizerStepEvents,
    *,
    batches: Sequence[int],
    workspace: int,
) -> tuple[EventComposer, int]:
    """Compose two steps; returns them, and the bytes of reduced gradients.

    Args:
        samples: one for each activation checkpointing mode.
        modes: index of each block's mode.
        micro_batches: of the second step; the first has one.
        optimizer_step: of a rank with all layers.
        batches: sizes of the other micro-batches' tensors, which are allocated from the first step on.
        workspace: as in `EventComposer`.

    Raises:
        ExtrapolationError: the samples do not determine an event.
    """
    layers, size = len(modes), 0
    composer = EventComposer({0: layers}, workspace)
    composer.add_setup(optimizer_step)
    for step, number in enumerate((1, micro_batches)):
        if step:
            for size_of_tensor in batches:
                composer.allocate(size_of_tensor, "other")
            composer.begin_step()
        first = samples[0]
        opening = StepPosition(step, NOWHERE, None, PROLOGUE, None)
        composer.replay(first, opening, opening)
        few = 1 if step == 0 else (first.last or 0) + 1
        for micro, there in enumerate(sampled_micro_batches(few, number)):
            for part, block in pass_parts(layers):
                source = StepPosition(step, 0, there, part, None if block is None else sampled_block(block, layers))
                mode = modes[mode_block(part, block)]
                composer.replay(samples[mode], source, StepPosition(step, 0, micro, part, block), block)
        at = StepPosition(step, 0, None, END, None)
        gradients = {
            name: _gradient(composer, samples, modes, name, at) for name in optimizer_step.gradients[step].values()
        }
        size = composer.add_optimizer_step(optimizer_step, step, gradients, find_loss(composer, first, step))
    return composer, size


def find_loss(composer: EventComposer, sample: SampleEvents, step: int) -> int:
    """The storage of a step's loss: allocated in its prologue, released by no pass."""
    opening = StepPosition(step, NOWHERE, None, PROLOGUE, None)
    events = (
        event
        for position, event_segments in sample.event_segments.items()
        if position.step == step
        for segment in event_segments
        for event in segment.events
    )
    freed = {event.allocation for event in events if not event.size}
    allocations = [
        allocation for allocation, site in sample.sites.items() if site.position == opening and allocation not in freed
    ]
    if len(allocations) != 1:
        raise ExtrapolationError("more than a loss is allocated before the passes")
    return composer.locate(sample, allocations[0], opening, opening)


def sampled_micro_batches(few: int, number: int) -> list[int]:
    """For each of so many micro-batches, which of a few is like event."""
    return list(range(few)) if number == few else [0, *[1] * (number - few + 1), *range(2, few)]


def sampled_block(block: int, layers: int) -> int:
    """The sampled block for a block of the full model."""
    return (
        min(block, SAMPLED_LAYERS // 2) if layers - block > SAMPLED_LAYERS // 2 else SAMPLED_LAYERS - (layers - block)
    )


def pass_parts(layers: int) -> Iterator[tuple[str, int | None]]:
    """Parts of a micro-batch's passes and their blocks, in order."""
    yield "before", None
    yield from (("forward", block) for block in range(layers))
    yield "between", None
    yield from (("backward", block) for block in reversed(range(layers)))
    yield "after", None


def mode_block(part: str, block: int | None) -> int:
    """Index of the block whose checkpointing mode applies to a part."""
    if block is not None:
        return block
    return -1 if part == "between" else 0


def split_layer_number(name: str) -> tuple[int | None, str]:
    """The layer number in a parameter's name, and the name with `{}` in its place."""
    words = name.split(".")
    if "blocks" not in words:
        return None, name
    place = words.index("blocks") + 1
    return int(words[place]), ".".join([*words[:place], "{}", *words[place + 1 :]])


def with_layer_numbers(name: str, layers: Mapping[int, int]) -> str:
    """A parameter's name with its layer renumbered."""
    layer, pattern = split_layer_number(name)
    return name if layer is None else pattern.format(layers[layer])


def gradient_allocation(sample: SampleEvents, step: int, name: str) -> int:
    """Allocation of a parameter's reduced gradient in a sample."""
    found: Mapping[str, int] = sample.gradients[step]
    if name not in found:
        raise ExtrapolationError(f"{name} has no gradient in the sample")
    return found[name]


def _gradient(
    composer: EventComposer, samples: Sequence[SampleEvents], modes: Sequence[int], name: str, at: StepPosition
) -> int:
    block, pattern = split_layer_number(name)
    sample = samples[modes[0 if block is None else block]]
    there = None if block is None else sampled_block(block, len(modes))
    allocation = gradient_allocation(sample, at.step, pattern.format(there))
    return composer.locate(sample, allocation, at._replace(block=there), at._replace(block=block))
