"""Schedule simulation of one rank: the trainer's own `Pipeline` on stages without computation.

It records the lifetimes of hidden states, which depend only on the schedule.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from titan_exp.config.layout.pipeline_schedules import Action, microbatches_of
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.parallel.pipeline_parallel.runtime import Pipeline
from titan_exp.parallel.pipeline_parallel.stage import NODES_LIVE_ALONE
from titan_exp.plan.extrapolate.stages import backward_ways
from titan_exp.plan.time.roofline import schedule_and_bubble

KINDS = ("received", "made", "objective")
"""Kinds of hidden states and gradients: received from another rank; of this rank; the last stage's objective."""


@dataclass(frozen=True)
class ScheduledAction:
    """Action of a rank."""

    action: Action
    """Stage, kind and micro-batch."""
    sampled: int
    """Equivalent micro-batch of a sample: 0 for the stage's first action that allocates gathered parameters or
    gradients, a later one of `backward_ways` for others; 2 for the last one without a pipeline, which reduces
    gradients."""


class SimulationEvent(NamedTuple):
    """Event of a schedule simulation."""

    what: str
    """`begin` and `end` of an action; `allocate` and `release` of hidden states."""
    which: int
    """Number of the action or of the hidden states."""
    kind: int = 0
    """Index in `KINDS` of allocated hidden states."""


@dataclass(frozen=True)
class ScheduleSimulation:
    """Actions and events of a rank's step."""

    actions: list[ScheduledAction]
    """Actions in order."""
    events: list[SimulationEvent]
    """Events in order."""
    sent: int
    """Number of sends."""


@dataclass
class _Recorder:
    sent: int = 0
    actions: list[ScheduledAction] = field(default_factory=list)
    seen: Counter[tuple[int, str]] = field(default_factory=Counter)
    events: list[SimulationEvent] = field(default_factory=list)
    count: int = 0


class _Hidden:
    """Placeholder with the lifetime of hidden states."""

    def __init__(self, recorder: _Recorder, kind: int) -> None:
        self._recorder, self._number = recorder, recorder.count
        recorder.count += 1
        recorder.events.append(SimulationEvent("allocate", self._number, kind))

    def __del__(self) -> None:
        self._recorder.events.append(SimulationEvent("release", self._number))

    def contiguous(self) -> "_Hidden":
        return self


class _Stage:
    """Holds hidden states like `pipeline_parallel.stage.Stage`."""

    shared: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    module = None

    def __init__(self, number: int, last: bool, microbatches: int, sampled: "_SampledActions", recorder: _Recorder):
        self.number, self.last, self._microbatches, self._recorder = number, last, microbatches, recorder
        self._sampled, self._passes = sampled, dict[int, list[Any]]()

    def forward(self, microbatch: int, hidden: Any, _: Any) -> Any:
        with self._action("F", microbatch):
            output = _Hidden(self._recorder, 2 if self.last else 1)
            self._passes[microbatch] = [hidden, output]
        return output

    def backward(self, microbatch: int, gradient: Any) -> Any:
        with self._action("B", microbatch):
            # Local references of `_backward` must be released before the action ends.
            return self._backward(microbatch)

    def _backward(self, microbatch: int) -> Any:
        hidden, output = self._passes.pop(microbatch)
        result = None if hidden is None else _Hidden(self._recorder, 1)
        del output
        return result

    def backward_input(self, microbatch: int, gradient: Any) -> Any:
        with self._action("I", microbatch):
            kept = self._passes[microbatch]
            kept.append(gradient)
            if kept[0] is None:
                return None
            result = _Hidden(self._recorder, 1)
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
        recorder = self._recorder
        recorder.events.append(SimulationEvent("begin", len(recorder.actions)))
        yield
        recorder.events.append(SimulationEvent("end", len(recorder.actions)))
        seen, sampled = recorder.seen[self.number, kind], self._sampled.next(kind)
        recorder.seen[self.number, kind] += 1
        # Micro-batches are numbered through all passes.
        action = Action(self.number, kind, microbatch + seen // self._microbatches * self._microbatches)
        recorder.actions.append(ScheduledAction(action, sampled))


class _SampledActions:
    """Micro-batches of a sample, for each action of a stage the one that does the same.

    `ways` and `resharded` as in `SampleKey`.
    """

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

    recorder: _Recorder
    rank: int
    sends_complete: bool

    def empty(self) -> _Hidden:
        return _Hidden(self.recorder, 0)

    def send(self, *_: Any) -> "_Transport":
        self.recorder.sent += 1
        return self

    def receive(self, *_: Any) -> "_Transport":
        return self

    def is_sent(self, _: Any) -> bool:
        return self.sends_complete

    def wait(self) -> None:
        """Wait for a message: no-op."""


def simulate_rank(
    layout: ResolvedLayout, rank: int, *, sends_complete: bool, passes: int | None = None
) -> ScheduleSimulation:
    """Simulate a pipeline rank's step; `passes` of micro-batches through the pipeline are by default those of a step.

    Sends complete immediately if `sends_complete`. On CUDA the host queries a GPU event (`WorkNCCL::isCompleted`)
    queued behind several micro-batches of kernels, so sent tensors are held until the wait at the end of the pass.
    """
    passes = passes or layout.gradient_accumulation // layout.pipeline_microbatches
    schedule = layout.parallelism.pp_schedule, layout.parallelism.pp, layout.stage_count, layout.pipeline_microbatches
    resharded = layout.reshard_policy != "never"
    placement = tuple(layout.stage_placement)
    return _simulate(schedule, placement, rank, passes, sends_complete=sends_complete, resharded=resharded)


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
    recorder, (orders, _) = _Recorder(), schedule_and_bubble(*schedule)
    ways = backward_ways(orders)
    stages: Any = [
        _Stage(
            number,
            number == len(placement) - 1,
            microbatches_of(orders),
            _SampledActions(ways[number], resharded),
            recorder,
        )
        for number, owner in enumerate(placement)
        if owner == rank
    ]
    transport: Any = _Transport(recorder, rank, sends_complete)
    pipeline = Pipeline(stages, [orders], list(placement), transport, keep_gathered=True)
    pipeline.train([_compute] * passes, pipeline.microbatches)
    events = list(recorder.events)
    return ScheduleSimulation(recorder.actions, events, recorder.sent)


def microbatch_loop(micro_batches: int, sampled: int) -> ScheduleSimulation:
    """Simulation of a step without a pipeline: forward and backward of each micro-batch, no hidden states.

    `sampled` is the number of micro-batches in the sample: first, repeated and last, or fewer.
    """
    assert micro_batches >= sampled, "no fewer micro-batches than in the sample"
    order = [0, *[1] * (micro_batches - sampled + 1), *range(2, sampled)] if sampled > 1 else [0] * micro_batches
    actions = [
        ScheduledAction(Action(0, kind, microbatch), like) for microbatch, like in enumerate(order) for kind in "FB"
    ]
    events = [SimulationEvent(what, number) for number in range(len(actions)) for what in ("begin", "end")]
    return ScheduleSimulation(actions, events, 0)


def _compute(*_: Any) -> Any:
    """No computation."""
