"""Trace of the optimizer step: gradient clipping, the update, and released gradients.

It depends on the number of layers alone, so it is traced without forward and backward, with empty gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from titan_exp.config.groups.experiment import Experiment
from titan_exp.plan.extrapolate.allocation_events import ExtrapolationError, OptimizerStepEvents
from titan_exp.plan.trace.fake_world import FakeRank, fake_rank
from titan_exp.plan.trace.segments import (
    OPTIMIZER_STEP,
    CategoryBytes,
    EventSegment,
    Segment,
    SegmentTracker,
    category_bytes,
    join_segments,
    sum_costs,
)
from titan_exp.plan.trace.trace_step import trace_step
from titan_exp.trainer.train_step import train_step


@dataclass(frozen=True)
class OptimizerStep:
    """Optimizer step of one rank."""

    segment: Segment
    """Net allocation, peak and costs."""
    persistent: CategoryBytes
    """Bytes of parameters and optimizer state."""
    gradients: int
    """Bytes of reduced gradients, which it releases."""


def trace_optimizer_step(experiment: Experiment, rank: int, *, cuda: bool) -> OptimizerStep:
    """Trace the optimizer step of a global rank."""
    tracker = SegmentTracker()
    with fake_rank(experiment, rank) as fake:
        trace = trace_step(fake.state, lambda: _run_optimizer_step(fake), cuda=cuda, segments=tracker)
    segments = tracker.segments()
    first = next(place for place, segment in enumerate(segments) if segment.label == OPTIMIZER_STEP)
    kept = {name: trace.persistent[name] for name in ("parameters", "optimizer")}
    return OptimizerStep(join_segments(OPTIMIZER_STEP, segments[first:]), category_bytes(kept), trace.gradients)


def trace_optimizer_step_events(
    experiment: Experiment, rank: int, layers: Sequence[int], *, cuda: bool
) -> OptimizerStepEvents:
    """Trace the setup of a global rank, with these layers of the full model, and two optimizer steps.

    Raises:
        ExtrapolationError: an optimizer step reads more than gradients and a loss.
    """
    tracker = SegmentTracker()
    with fake_rank(experiment, rank) as fake:
        trace_step(
            fake.state, lambda: _run_optimizer_step(fake), preallocated=fake.preallocated, cuda=cuda, segments=tracker
        )
        event_segments, segments, built = tracker.event_segments(), tracker.segments(), fake.state.built
    ends, losses = list[list[EventSegment]](), list[int]()
    for step, gradients in enumerate(tracker.reduced_gradients):
        own = [segment for segment in event_segments if segment.step == step]
        first = next(place for place, segment in enumerate(own) if segment.label == OPTIMIZER_STEP)
        made = {event.allocation for segment in own[:first] for event in segment.events if event.size} - set(
            gradients.values()
        )
        if len(made) != 1:
            raise ExtrapolationError("the optimizer step reads more than gradients and a loss")
        losses += made
        ends.append(own[first:])
    names = [{allocation: name for name, allocation in gradients.items()} for gradients in tracker.reduced_gradients]
    build = [segment for segment in event_segments if segment.step < 0]
    costs = sum_costs(
        [segment.costs for segment in segments[[segment.label for segment in segments].index(OPTIMIZER_STEP) :]]
    )
    return OptimizerStepEvents(build, ends, names, losses, layers, costs, built.parameters, built.flops_per_token)


def linear_combination(terms: list[tuple[int, OptimizerStep]]) -> OptimizerStep:
    """Sum of optimizer steps with integer weights."""
    net = sum((times * optimizer_step.segment.net for times, optimizer_step in terms), category_bytes({}))
    peak = sum((times * optimizer_step.segment.peak for times, optimizer_step in terms), category_bytes({}))
    kept = sum((times * optimizer_step.persistent for times, optimizer_step in terms), category_bytes({}))
    costs = sum_costs([sum_costs([optimizer_step.segment.costs], times) for times, optimizer_step in terms])
    last = terms[-1][1].segment
    return OptimizerStep(
        Segment(OPTIMIZER_STEP, net, peak, last.where, costs),
        kept,
        sum(times * optimizer_step.gradients for times, optimizer_step in terms),
    )


def _run_optimizer_step(fake: FakeRank) -> None:
    state = fake.state

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
    train_step(
        model,
        state.optimizer,
        [],
        tokens=1,
        lr=fake.experiment.optimizer.lr,
        max_grad_norm=fake.experiment.training.max_grad_norm,
        mesh=state.mesh,
    )
