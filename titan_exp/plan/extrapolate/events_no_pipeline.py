"""The story of a step without a pipeline, woven from that of five layers and three micro-batches."""

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
from titan_exp.plan.extrapolate.layers_and_microbatches import MICRO_BATCH, ModelSample
from titan_exp.plan.extrapolate.optimizer_step import OPTIMIZER_STEP
from titan_exp.plan.extrapolate.segments import EventSegment

PROLOGUE, END = "prologue", "end"
"""Parts of a step: before the passes, and after them."""


def model_events(sample: ModelSample) -> SampleEvents:
    """What happens where in a small run."""
    scenes: dict[StepPosition, list[EventSegment]] = {}
    number = 0
    for step in (0, 1):
        part, block, micro = PROLOGUE, None, None
        number = -1
        for scene in sample.scenes:
            if scene.step != step or part == END:
                continue
            if scene.label == OPTIMIZER_STEP:
                part, block, micro = END, None, None
                continue
            if scene.label == MICRO_BATCH:
                number += 1
                part, block, micro = "before", None, number
            elif ", block " in scene.label:
                part, _, at = scene.label.partition(", block ")
                block = int(at)
            elif part == "forward":
                part, block = "between", None
            elif part == "backward":
                part, block = "after", None
            stage = 0 if micro is not None else NOWHERE
            scenes.setdefault(StepPosition(step, stage, micro, part, block), []).append(scene)
    return SampleEvents(scenes, {0: SAMPLED_LAYERS}, number, sample.reduced)


def compose_no_pipeline(
    samples: Sequence[SampleEvents],
    modes: Sequence[int],
    micro_batches: int,
    tail: OptimizerStepEvents,
    *,
    batches: Sequence[int],
    workspace: int,
) -> tuple[EventComposer, int]:
    """Weave two steps; returns them, and the bytes of reduced gradients.

    Args:
        samples: one for each way of recomputation.
        modes: of each block, which of these it has.
        micro_batches: of the second step; the first has one.
        tail: build and ends of the steps, with all layers.
        batches: bytes of tensors of the other micro-batches, which are there from the first step on.
        workspace: as of `EventComposer`.

    Raises:
        Unwoven: they cannot be.
    """
    layers, size = len(modes), 0
    weaver = EventComposer({0: layers}, workspace)
    weaver.build(tail)
    for step, number in enumerate((1, micro_batches)):
        if step:
            for bytes_of_one in batches:
                weaver.birth(bytes_of_one, "other")
            weaver.begin()
        first = samples[0]
        opening = StepPosition(step, NOWHERE, None, PROLOGUE, None)
        weaver.play(first, opening, opening)
        few = 1 if step == 0 else (first.last or 0) + 1
        for micro, there in enumerate(chosen(few, number)):
            for part, block in parts_of_passes(layers):
                source = StepPosition(step, 0, there, part, None if block is None else block_for(block, layers))
                mode = modes[mode_of(part, block)]
                weaver.play(samples[mode], source, StepPosition(step, 0, micro, part, block), block)
        at = StepPosition(step, 0, None, END, None)
        gradients = {name: _gradient(weaver, samples, modes, name, at) for name in tail.gradients[step].values()}
        size = weaver.end(tail, step, gradients, loss_of(weaver, first, step))
    return weaver, size


def loss_of(weaver: EventComposer, sample: SampleEvents, step: int) -> int:
    """The storage of a step's loss: what its prologue makes and no pass frees."""
    opening = StepPosition(step, NOWHERE, None, PROLOGUE, None)
    told = (it for spot, scenes in sample.scenes.items() if spot.step == step for scene in scenes for it in scene.told)
    freed = {it.birth for it in told if not it.size}
    births = [birth for birth, origin in sample.origins.items() if origin.spot == opening and birth not in freed]
    if len(births) != 1:
        raise ExtrapolationError("before the passes there is more than a loss")
    return weaver.find(sample, births[0], opening, opening)


def chosen(few: int, number: int) -> list[int]:
    """For each of so many micro-batches, which of a few is like it."""
    return list(range(few)) if number == few else [0, *[1] * (number - few + 1), *range(2, few)]


def block_for(block: int, layers: int) -> int:
    """Which block of the small run is like one of so many."""
    return (
        min(block, SAMPLED_LAYERS // 2) if layers - block > SAMPLED_LAYERS // 2 else SAMPLED_LAYERS - (layers - block)
    )


def parts_of_passes(layers: int) -> Iterator[tuple[str, int | None]]:
    """Parts of a micro-batch's passes, with their blocks, in order."""
    yield "before", None
    yield from (("forward", block) for block in range(layers))
    yield "between", None
    yield from (("backward", block) for block in reversed(range(layers)))
    yield "after", None


def mode_of(part: str, block: int | None) -> int:
    """The block by whose way of recomputation a part goes."""
    if block is not None:
        return block
    return -1 if part == "between" else 0


def named_block(name: str) -> tuple[int | None, str]:
    """The block of a parameter, by its name, and a pattern of names of its like."""
    words = name.split(".")
    if "blocks" not in words:
        return None, name
    place = words.index("blocks") + 1
    return int(words[place]), ".".join([*words[:place], "{}", *words[place + 1 :]])


def renamed(name: str, layers: Mapping[int, int]) -> str:
    """A parameter's name with another number of its layer."""
    layer, pattern = named_block(name)
    return name if layer is None else pattern.format(layers[layer])


def gradient_named(sample: SampleEvents, step: int, name: str) -> int:
    """The birth of a parameter's reduced gradient in a small run."""
    found: Mapping[str, int] = sample.gradients[step]
    if name not in found:
        raise ExtrapolationError(f"{name} has no gradient in the small run")
    return found[name]


def _gradient(
    weaver: EventComposer, samples: Sequence[SampleEvents], modes: Sequence[int], name: str, at: StepPosition
) -> int:
    block, pattern = named_block(name)
    sample = samples[modes[0 if block is None else block]]
    there = None if block is None else block_for(block, len(modes))
    birth = gradient_named(sample, at.step, pattern.format(there))
    return weaver.find(sample, birth, at._replace(block=there), at._replace(block=block))
