"""The end of a step, from reduced gradients to the next one: clipping, the optimizer, what is freed.

It knows layers by their number alone, so it is traced for one, two and three of them, without any forward or backward
pass: its gradients are made of nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from titan_exp.config.groups.experiment import Experiment
from titan_exp.plan.extrapolate.allocation_events import ExtrapolationError, OptimizerStepEvents
from titan_exp.plan.extrapolate.segments import (
    CategoryBytes,
    EventSegment,
    Segment,
    SegmentTracker,
    category_bytes,
    join_segments,
    sum_costs,
)
from titan_exp.plan.trace.fake_world import FakeRank, fake_rank
from titan_exp.plan.trace.trace_step import trace_step
from titan_exp.trainer import train_step as trainer_step

OPTIMIZER_STEP = "the end of the step"


@dataclass(frozen=True)
class OptimizerStep:
    """The end of a step of one rank."""

    piece: Segment
    """All of it."""
    persistent: CategoryBytes
    """Parameters and the optimizer's state."""
    gradients: int
    """Bytes of reduced gradients, which the first part of the step has left and this one frees."""


def trace_optimizer_step(experiment: Experiment, rank: int, *, cuda: bool) -> OptimizerStep:
    """Trace the end of a rank's step.

    Args:
        experiment: the run, its layout resolved.
        rank: of all processes.
        cuda: as of `trace_step`.
    """
    tape = SegmentTracker()
    with fake_rank(experiment, rank) as it, marked_tail(tape):
        trace = trace_step(it.state, lambda: _end(it), cuda=cuda, segments=tape)
    pieces = tape.pieces()
    first = next(place for place, piece in enumerate(pieces) if piece.label == OPTIMIZER_STEP)
    kept = {name: trace.persistent[name] for name in ("parameters", "optimizer")}
    return OptimizerStep(join_segments(OPTIMIZER_STEP, pieces[first:]), category_bytes(kept), trace.gradients)


@contextmanager
def marked_tail(tape: SegmentTracker) -> Iterator[None]:
    """Cut a tape where a step's passes are over."""
    original = trainer_step.reduce_partial_gradients

    def marked(*args: Any) -> None:
        tape.reduced.append(births_of_gradients(tape, args[0]))
        tape.cut(OPTIMIZER_STEP)
        original(*args)

    with patch.object(trainer_step, "reduce_partial_gradients", marked):
        yield


def births_of_gradients(tape: SegmentTracker, parts: Iterable[nn.Module]) -> dict[str, int]:
    """Births of the storages of gradients, by the names of their parameters."""
    named = [pair for part in parts for pair in part.named_parameters()]
    return {name: tape.birth(weight.grad) for name, weight in named if weight.grad is not None}


def trace_optimizer_step_events(
    experiment: Experiment, rank: int, layers: Sequence[int], *, cuda: bool
) -> OptimizerStepEvents:
    """Trace the build of a rank and the ends of two steps of it.

    Args:
        experiment: the run, its layout resolved.
        rank: of all processes.
        layers: numbers of its layers in the whole model.
        cuda: as of `trace_step`.

    Raises:
        Unwoven: more than gradients and a loss go into the end of a step.
    """
    tape = SegmentTracker()
    with fake_rank(experiment, rank) as it, marked_tail(tape):
        trace_step(it.state, lambda: _end(it), preallocated=it.preallocated, cuda=cuda, segments=tape)
        scenes, pieces, built = tape.scenes(), tape.pieces(), it.state.built
    ends, losses = list[list[EventSegment]](), list[int]()
    for step, gradients in enumerate(tape.reduced):
        own = [scene for scene in scenes if scene.step == step]
        first = next(place for place, scene in enumerate(own) if scene.label == OPTIMIZER_STEP)
        made = {it.birth for scene in own[:first] for it in scene.told if it.size} - set(gradients.values())
        if len(made) != 1:
            raise ExtrapolationError("more than gradients and a loss go into the end of a step")
        losses += made
        ends.append(own[first:])
    names = [{birth: name for name, birth in gradients.items()} for gradients in tape.reduced]
    build = [scene for scene in scenes if scene.step < 0]
    work = sum_costs([piece.costs for piece in pieces[[piece.label for piece in pieces].index(OPTIMIZER_STEP) :]])
    return OptimizerStepEvents(build, ends, names, losses, layers, work, built.parameters, built.flops_per_token)


def linear_combination(terms: list[tuple[int, OptimizerStep]]) -> OptimizerStep:
    """A sum of tails, each so many times, where negative numbers take away."""
    net = sum((times * tail.piece.net for times, tail in terms), category_bytes({}))
    most = sum((times * tail.piece.peak for times, tail in terms), category_bytes({}))
    kept = sum((times * tail.persistent for times, tail in terms), category_bytes({}))
    work = sum_costs([sum_costs([tail.piece.costs], times) for times, tail in terms])
    last = terms[-1][1].piece
    return OptimizerStep(
        Segment(OPTIMIZER_STEP, net, most, last.where, work), kept, sum(times * tail.gradients for times, tail in terms)
    )


def _end(it: FakeRank) -> None:
    state = it.state

    def no_passes(*_: Any) -> torch.Tensor:
        for weight in state.model.parameters():
            weight.grad = torch.empty_like(weight)
        return torch.zeros(())

    model: Any = SimpleNamespace(
        parts=state.model.parts,
        parameters=state.model.parameters,
        unique_parameters=state.model.unique_parameters,
        forward_backward=no_passes,
    )
    trainer_step.train_step(
        model,
        state.optimizer,
        [],
        tokens=1,
        lr=it.experiment.optimizer.lr,
        max_grad_norm=it.experiment.training.max_grad_norm,
        mesh=state.mesh,
    )
