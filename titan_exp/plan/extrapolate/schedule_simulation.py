"""A pipeline rank's schedule, rehearsed: the trainer's own `Pipeline` over stages that compute nothing.

It shows which hidden states are held when: how long they live follows from the schedule alone, not from the stages.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from titan_exp.config.layout.pipeline_schedules import Action, Schedule
from titan_exp.config.layout.schedule_timeline import timeline
from titan_exp.parallel.pipeline_parallel import runtime as parallel_pipeline
from titan_exp.parallel.pipeline_parallel import schedule_actions as parallel_orders
from titan_exp.parallel.pipeline_parallel.runtime import ActivationSpec, Pipeline

KINDS = ("received", "made", "objective")
"""What is handed over: hidden states and their gradients from another rank; those of a stage here; the last stage's
output, a number."""


@dataclass(frozen=True)
class ScheduledAction:
    """One action of a rank."""

    action: Action
    """Of which stage and micro-batch."""
    first: bool
    """Whether it is the stage's first of its kind in this step."""
    waiting: tuple[int, ...]
    """Most hidden states, by kind, held at once since the action before."""
    before: tuple[int, ...]
    """Those held when it begins."""
    after: tuple[int, ...]
    """Those held when it has ended."""


class SimulationEvent(NamedTuple):
    """Something that happens in a rehearsal."""

    what: str
    """`turn` and `over` of an action; `born` and `gone` of hidden states."""
    which: int
    """Number of the turn, or of the hidden states."""
    kind: int = 0
    """Of hidden states that are born, which of `KINDS`."""


@dataclass(frozen=True)
class ScheduleSimulation:
    """A rank's turns in a step."""

    turns: list[ScheduledAction]
    """In order."""
    heard: list[SimulationEvent]
    """What happens in them and between them, in order."""
    sent: int
    """Hidden states that go to other ranks."""
    received: int
    """Those that come."""


@dataclass
class _Tally:
    held: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    most: tuple[int, ...] = (0,) * len(KINDS)
    sent: int = 0
    received: int = 0
    turns: list[ScheduledAction] = field(default_factory=list)
    seen: set[tuple[int, str]] = field(default_factory=set)
    heard: list[SimulationEvent] = field(default_factory=list)
    made: int = 0

    def add(self, kind: int, change: int) -> None:
        self.held[kind] += change
        if sum(self.held) > sum(self.most):
            self.most = tuple(self.held)


class _Hidden:
    """Stands for hidden states, and for nothing else: it is there as long as they would be."""

    def __init__(self, tally: _Tally, kind: int) -> None:
        self._tally, self._kind, self._number = tally, kind, tally.made
        tally.made += 1
        tally.heard.append(SimulationEvent("born", self._number, kind))
        tally.add(kind, 1)

    def __del__(self) -> None:
        self._tally.heard.append(SimulationEvent("gone", self._number))
        self._tally.add(self._kind, -1)

    def contiguous(self) -> "_Hidden":
        return self


class _Stage:
    """Keeps what `parallel.stage.Stage` keeps of hidden states."""

    shared: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    module = None

    def __init__(self, number: int, last: bool, tally: _Tally) -> None:
        self.number, self.last, self._tally = number, last, tally
        self._passes: dict[int, list[Any]] = {}

    def forward(self, microbatch: int, hidden: Any, _: Any) -> Any:
        with self._turn("F", microbatch):
            output = _Hidden(self._tally, 2 if self.last else 1)
            self._passes[microbatch] = [hidden, output]
        return output

    def backward(self, microbatch: int, gradient: Any) -> Any:
        with self._turn("B", microbatch):
            # What is looked at here must be gone when the turn is over.
            return self._backward(microbatch)

    def _backward(self, microbatch: int) -> Any:
        hidden, _ = self._passes.pop(microbatch)
        return None if hidden is None else _Hidden(self._tally, 1)

    @contextmanager
    def _turn(self, kind: str, microbatch: int) -> Iterator[None]:
        tally = self._tally
        waiting, before = tally.most, tuple(tally.held)
        tally.heard.append(SimulationEvent("turn", len(tally.turns)))
        yield
        tally.heard.append(SimulationEvent("over", len(tally.turns)))
        first = (self.number, kind) not in tally.seen
        tally.seen.add((self.number, kind))
        after = tally.most = tuple(tally.held)
        tally.turns.append(ScheduledAction(Action(self.number, kind, microbatch), first, waiting, before, after))


def simulate_schedule(
    orders: Schedule, placement: Sequence[int], rank: int, *, passes: int, sends_complete: bool
) -> ScheduleSimulation:
    """Go through a rank's step.

    Args:
        orders: actions of each pipeline rank in one pass.
        placement: pipeline rank of each stage.
        rank: of the pipeline.
        passes: how often micro-batches go through it in a step.
        delivered: whether a message is known to have arrived as soon as it is sent. On CUDA it is not: there the host
            asks an event of the GPU (`WorkNCCL::isCompleted`), behind which it has put work of several micro-batches,
            so that what is sent is held until the host knows, at the latest when it waits at the end of the pass.
    """
    tally = _Tally()
    stages: Any = [
        _Stage(number, number == len(placement) - 1, tally) for number, its in enumerate(placement) if its == rank
    ]
    group: Any = None
    with _nobody_answers(tally, rank, sends_complete):
        pipeline = Pipeline(
            stages,
            orders,
            list(placement),
            group,
            ActivationSpec((), torch.float32, torch.device("cpu")),
            keep_gathered=True,
        )
        pipeline.train([_compute] * passes)
        heard = list(tally.heard)
    return ScheduleSimulation(tally.turns, heard, tally.sent, tally.received)


@contextmanager
def cached_timelines() -> Iterator[None]:
    """For the time of the block, when actions happen is found out once for each list of orders."""
    kept: dict[int, Any] = {}

    def once(orders: Schedule) -> Any:
        if id(orders) not in kept:
            kept[id(orders)] = (orders, timeline(orders))
        return kept[id(orders)][1]

    with patch.object(parallel_orders, "timeline", once):
        yield


@contextmanager
def _nobody_answers(tally: _Tally, rank: int, sends_complete: bool) -> Iterator[None]:
    work = SimpleNamespace(is_completed=lambda: sends_complete, wait=lambda: None)

    def send(*_: Any, **__: Any) -> Any:
        tally.sent += 1
        return work

    def receive(*_: Any, **__: Any) -> Any:
        tally.received += 1
        return work

    with (
        patch.object(parallel_pipeline, "torch", SimpleNamespace(empty=lambda *_, **__: _Hidden(tally, 0))),
        patch.multiple(dist, isend=send, irecv=receive, get_rank=lambda *_: rank),
    ):
        yield


def _compute(*_: Any) -> Any:
    """What a stage would do."""
