"""Pipeline stages of a rank, the samples that they share, and a simulation of its schedule.

Without a pipeline, a rank has one stage of all layers, and its schedule is the loop over micro-batches. The simulation
is the trainer's `Pipeline` on stages without computation: lifetimes of hidden states depend only on the schedule.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import Action, Schedule, microbatches_of
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import mtp_depth
from titan_exp.parallel.pipeline_runtime import Pipeline
from titan_exp.parallel.pipeline_stage import NODES_LIVE_ALONE
from titan_exp.plan.extrapolate.eligibility import recompute_modes, stage_sizes
from titan_exp.plan.roofline import schedule_and_bubble

WHOLE, FIRST, MIDDLE, LAST = "whole", "first", "middle", "last"
"""Kinds of stages: whole model; with the embedding, middle, with the head."""
SAMPLED_STAGES = {WHOLE: 0, FIRST: 0, MIDDLE: 1, LAST: 3}  # stage number in a sample, by kind of stage
OTHER_RANK = 2  # stage number of a sample's other rank; that stage has one period of layers


class ExtrapolationError(Exception):
    """The samples do not determine the full step, so it must be traced."""


class SampleKey(NamedTuple):
    """Everything that distinguishes the samples of a run's stages."""

    size: int | None  # size of the stages, from `eligibility.stage_sizes`
    ways: tuple[str, ...]  # backward passes of its micro-batches, from `backward_ways`
    resharded: bool = False  # True if parameters are gathered again for each micro-batch

    @property
    def order(self) -> Iterator[tuple[str, int]]:
        """Kinds and micro-batches of a sampled stage's actions. With `resharded`, a pass finds parameters as the
        previous pass left them. So there are forward passes after no pass, after a forward and after a backward pass,
        and later backward passes after either."""
        if self.resharded:
            return zip("FFBFBB", (0, 1, 0, 2, 1, 2), strict=True)
        return ((kind, micro) for micro, way in enumerate(self.ways) for kind in "F" + way)


@dataclass(frozen=True)
class StageShape:
    """Kind and blocks of a stage."""

    number: int
    kind: str
    layers: tuple[int, ...]  # number of each block in the model
    modes: tuple[int, ...]
    sample: SampleKey

    def mode(self, place: int) -> int:
        """Index of a block's activation checkpointing mode; 0 for a stage without blocks."""
        return self.modes[place] if self.modes else 0

    def last_mode(self, kind: str) -> int:
        """Activation checkpointing mode of the block that an action of a kind passes last."""
        return self.mode(-1 if kind == "F" else 0)

    @property
    def sampled(self) -> int:
        """Stage number in a sample."""
        return SAMPLED_STAGES[self.kind]


class SampledPart(NamedTuple):
    """Part of a stage's action or gradient reduction, with the sampled part that it repeats."""

    mode: int  # index of the activation checkpointing mode whose sample it repeats
    stage: int
    block: int | None
    part: str  # part of the step, as in `StepPosition`
    place: int | None  # block of the full model's stage


def stages_of(experiment: Experiment, pipeline_rank: int) -> list[StageShape]:
    """Stages of a pipeline rank."""
    layout, mtp = ResolvedLayout.of(experiment), mtp_depth(experiment.model)
    _, modes = recompute_modes(experiment.activation_checkpoint, layout.layers + mtp)
    pipeline = layout.parallelism.pp > 1
    *layers, last = layout.stage_layers if pipeline else [[*range(layout.layers)]]
    layers = [*layers, [*last, *range(layout.layers, layout.layers + mtp)]]
    kinds = [FIRST, *[MIDDLE] * (len(layers) - 2), LAST] if pipeline else [WHOLE]
    placement = layout.stage_placement if pipeline else [0]
    return [
        StageShape(stage, kinds[stage], tuple(layers[stage]), tuple(modes[layer] for layer in layers[stage]), sample)
        for stage, (rank, sample) in enumerate(zip(placement, sample_keys(experiment), strict=True))
        if rank == pipeline_rank
    ]


def sample_keys(experiment: Experiment) -> list[SampleKey]:
    """Key of the samples of each pipeline stage."""
    layout, sizes = ResolvedLayout.of(experiment), stage_sizes(experiment)
    if layout.parallelism.pp > 1 and layout.reshard_policy != "never":
        return [SampleKey(size, ("B", "B", "B"), resharded=True) for size in sizes]
    if not layout.splits_backward:
        return [SampleKey(size, ("B", "B")) for size in sizes]
    schedule = layout.parallelism.pp_schedule, layout.parallelism.pp, layout.stage_count, layout.pipeline_microbatches
    ways = backward_ways(schedule_and_bubble(*schedule)[0])
    return [SampleKey(size, ways[stage]) for stage, size in enumerate(sizes)]


def backward_ways(orders: Schedule) -> dict[int, tuple[str, ...]]:
    """Kinds of backward passes of a sample's micro-batches, by stage: `B` is full, `IW` split. The first is the stage's
    first pass, which allocates its gradients; each kind in the schedule follows, repeated."""
    ways = {"B": "B", "I": "IW"}
    found = [(action.stage, ways[action.kind]) for order in orders for action in order if action.kind in ways]
    later = sorted({way for _, way in found})
    return {stage: (way, *later) for stage, way in reversed(found)}


KINDS = ("received", "made", "objective")
"""Kinds of hidden states and gradients: received from another rank, made on this rank, the last stage's objective."""


@dataclass(frozen=True)
class ScheduledAction:
    """Action of a rank."""

    action: Action  # stage, kind and micro-batch
    sampled: int
    """Equivalent micro-batch of a sample. 0 is the stage's first action that allocates gathered parameters or
    gradients, a later one of `backward_ways` stands for others, and 2 is the last micro-batch without a pipeline, which
    reduces gradients."""


class SimulationEvent(NamedTuple):
    """Event of a schedule simulation."""

    what: str  # kind of event: `begin` and `end` of an action; `allocate` and `release` of hidden states
    which: int  # index of the action or of the hidden states
    kind: int = 0  # index in `KINDS` of allocated hidden states


@dataclass
class ScheduleSimulation:
    """Actions and events of a rank's step, in order."""

    actions: list[ScheduledAction] = field(default_factory=list)
    events: list[SimulationEvent] = field(default_factory=list)
    sent: int = 0
    hidden: int = 0  # number of hidden states


class _Hidden:
    """Placeholder whose lifetime is that of hidden states."""

    def __init__(self, simulation: ScheduleSimulation, kind: int) -> None:
        self._events, self._number = simulation.events, simulation.hidden
        simulation.hidden += 1
        self._events.append(SimulationEvent("allocate", self._number, kind))

    def __del__(self) -> None:
        self._events.append(SimulationEvent("release", self._number))

    def contiguous(self) -> "_Hidden":
        return self


class _Stage:
    """Holds hidden states like `pipeline_parallel.stage.Stage`."""

    shared: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    module = None

    def __init__(
        self, number: int, last: bool, microbatches: int, sampled: "_SampledActions", simulation: ScheduleSimulation
    ) -> None:
        self.number, self.last, self._microbatches, self._simulation = number, last, microbatches, simulation
        self._sampled, self._passes, self._seen = sampled, dict[int, list[Any]](), Counter[str]()

    def forward(self, microbatch: int, hidden: Any, _: Any) -> Any:
        with self._action("F", microbatch):
            output = _Hidden(self._simulation, 2 if self.last else 1)
            self._passes[microbatch] = [hidden, output]
        return output

    def backward(self, microbatch: int, gradient: Any) -> Any:
        with self._action("B", microbatch):
            # Local references of `_backward` must be released before the action ends.
            return self._backward(microbatch)

    def _backward(self, microbatch: int) -> Any:
        hidden, output = self._passes.pop(microbatch)
        result = None if hidden is None else _Hidden(self._simulation, 1)
        del output
        return result

    def backward_input(self, microbatch: int, gradient: Any) -> Any:
        with self._action("I", microbatch):
            kept = self._passes[microbatch]
            kept.append(gradient)
            if kept[0] is None:
                return None
            result = _Hidden(self._simulation, 1)
            if NODES_LIVE_ALONE:
                kept[1] = None
            return result

    def backward_weights(self, microbatch: int) -> None:
        with self._action("W", microbatch):
            self._backward_weights(microbatch)

    def _backward_weights(self, microbatch: int) -> None:
        # Local references are released in this order.
        _input, _output, _gradient = self._passes.pop(microbatch)

    @contextmanager
    def _action(self, kind: str, microbatch: int) -> Iterator[None]:
        actions, events = self._simulation.actions, self._simulation.events
        events.append(SimulationEvent("begin", len(actions)))
        yield
        events.append(SimulationEvent("end", len(actions)))
        # Micro-batches are numbered through all passes.
        number = microbatch + self._seen[kind] // self._microbatches * self._microbatches
        self._seen[kind] += 1
        actions.append(ScheduledAction(Action(self.number, kind, number), self._sampled.next(kind)))


class _SampledActions:
    """Chooses the sampled micro-batch that does the same as an action; `ways` and `resharded` are as in `SampleKey`."""

    def __init__(self, ways: Sequence[str], resharded: bool) -> None:
        self._ways, self._resharded, self._seen = ways, resharded, list[str]()

    def next(self, kind: str) -> int:
        """Sampled micro-batch of the stage's next action."""
        before, seen = self._seen[-1:], set(self._seen)
        self._seen.append(kind)
        if self._resharded:
            return 0 if kind not in seen else 1 if before == ["F"] else 2
        if kind == "F":
            return int("F" in seen)
        inputs, weights = seen & {"I", "B"}, seen & {"W", "B"}
        assert kind != "B" or bool(inputs) == bool(weights), "checked by `unsupported_reason`"
        if not (weights if kind == "W" else inputs):
            return 0
        return self._ways.index("B" if kind == "B" else "IW", 1)


@dataclass
class _Transport:
    """Counts messages instead of sending them."""

    simulation: ScheduleSimulation
    rank: int
    sends_complete: bool

    def empty(self) -> _Hidden:
        return _Hidden(self.simulation, 0)

    def send(self, *_: Any) -> "_Transport":
        self.simulation.sent += 1
        return self

    def receive(self, *_: Any) -> "_Transport":
        return self

    def is_sent(self, _: Any) -> bool:
        return self.sends_complete

    def wait(self) -> None:
        pass


def simulate_rank(
    layout: ResolvedLayout, rank: int, *, sends_complete: bool, passes: int | None = None
) -> ScheduleSimulation:
    """Simulate a pipeline rank's step, or a given number of `passes` of micro-batches through the pipeline. Sends
    complete immediately if `sends_complete`. On CUDA the host queries a GPU event (`WorkNCCL::isCompleted`) queued
    behind several micro-batches of kernels, so sent tensors are held until the wait at the end of the pass."""
    passes = passes or layout.gradient_accumulation // layout.pipeline_microbatches
    schedule = layout.parallelism.pp_schedule, layout.parallelism.pp, layout.stage_count, layout.pipeline_microbatches
    flags = {"sends_complete": sends_complete, "resharded": layout.reshard_policy != "never"}
    return _simulate(schedule, tuple(layout.stage_placement), rank, passes, **flags)


@cache
def _simulate(
    schedule: tuple[str, int, int, int],
    placement: Sequence[int],
    rank: int,
    passes: int,
    *,
    sends_complete: bool,
    resharded: bool,
) -> ScheduleSimulation:
    simulation, (orders, _) = ScheduleSimulation(), schedule_and_bubble(*schedule)
    ways, count, last = backward_ways(orders), microbatches_of(orders), len(placement) - 1
    own = (stage for stage, owner in enumerate(placement) if owner == rank)
    stages: Any = [
        _Stage(stage, stage == last, count, _SampledActions(ways[stage], resharded), simulation) for stage in own
    ]
    transport: Any = _Transport(simulation, rank, sends_complete)
    pipeline = Pipeline(stages, [orders], list(placement), transport, keep_gathered=True)
    computations: Any = [lambda *_: None] * passes
    pipeline.train(computations, pipeline.microbatches)
    # What is still held is released after the step.
    return replace(simulation, events=list(simulation.events))


def microbatch_loop(micro_batches: int, sampled: int) -> ScheduleSimulation:
    """Simulation of a step without a pipeline: forward and backward of each micro-batch, no hidden states. `sampled` is
    the number of micro-batches in the sample: first, repeated and last, or fewer."""
    assert micro_batches >= sampled, "no fewer micro-batches than in the sample"
    order = [0, *[1] * (micro_batches - sampled + 1), *range(2, sampled)] if sampled > 1 else [0] * micro_batches
    actions = [ScheduledAction(Action(0, kind, number), like) for number, like in enumerate(order) for kind in "FB"]
    events = [SimulationEvent(what, number) for number in range(len(actions)) for what in ("begin", "end")]
    return ScheduleSimulation(actions, events)
