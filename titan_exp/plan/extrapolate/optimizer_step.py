"""Trace of the optimizer step: gradient clipping, the update, and released gradients.

It depends only on a rank's layers, so it is traced without forward and backward, with empty gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan.extrapolate.small_run import small_run
from titan_exp.plan.extrapolate.stages import FIRST, LAST, WHOLE
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.fake_world import FakeRank, fake_rank
from titan_exp.plan.trace.segments import (
    OPTIMIZER_STEP,
    CategoryBytes,
    Segment,
    SegmentTracker,
    category_bytes,
    join_segments,
    sum_costs,
)
from titan_exp.plan.trace.trace_step import trace_step
from titan_exp.trainer.objective.base import MetricSums
from titan_exp.trainer.train_step import train_step

KEPT = ("parameters", "gathered parameters", "optimizer")
"""Categories of memory between steps: masters, compute weights on one data rank, optimizer state."""


@dataclass(frozen=True)
class OptimizerStepTrace:
    """Setup and two optimizer steps of a rank, traced without passes."""

    setup: Sequence[Segment]
    """Before the first step."""
    ends: Sequence[Sequence[Segment]]
    """Each optimizer step, from reduced gradients to the next step."""
    gradients: Sequence[Mapping[int, str]]
    """Parameter names by the allocations of their placeholder gradients, for each step."""
    others: Sequence[Sequence[int]]
    """Other prior allocations in order, for each step: placeholder metrics, and everything else that the step reads."""
    persistent: CategoryBytes
    """Bytes of `KEPT` memory."""
    other: CategoryBytes
    """Other bytes between steps: buffers and counts of experts' tokens."""
    parameters: int
    """Parameters of the whole model."""
    flops_per_token: float
    """FLOPs of a training step per token, of the whole model."""

    @property
    def totals(self) -> "OptimizerStepTotals":
        """Totals of the second optimizer step."""
        step = join_segments(OPTIMIZER_STEP, self.ends[1])
        return OptimizerStepTotals(self.persistent, self.other, int(step.peak.sum()), step.costs)


@dataclass(frozen=True)
class OptimizerStepTotals:
    """Totals of an optimizer step, or a stage's contribution to them."""

    persistent: CategoryBytes
    """Bytes of `KEPT` memory."""
    other: CategoryBytes
    """Other bytes between steps."""
    peak: int
    """Bytes added at its peak."""
    costs: OpCosts
    """FLOPs, memory traffic and messages."""


@dataclass(frozen=True)
class OptimizerStepsByStage:
    """Optimizer step of any rank, as a linear function of its stages."""

    constant: OptimizerStepTotals
    """Constant part."""
    block: OptimizerStepTotals
    """Added by a block."""
    first: OptimizerStepTotals
    """Added by the embedding of a pipeline."""
    last: OptimizerStepTotals
    """Added by the head of a pipeline."""
    elsewhere: OptimizerStepTotals
    """Added by a block of another rank, whose counts of experts' tokens are summed."""
    distinct: int
    """Number of first blocks that differ from the rest, which are counted in `constant` or `first`."""

    def of(self, blocks: Mapping[str, int], layers: int) -> OptimizerStepTotals:
        """Optimizer step of a rank with the given number of blocks by kind of stage, in a model of `layers`."""
        has_first, has_last, own = FIRST in blocks or WHOLE in blocks, LAST in blocks, sum(blocks.values())
        others = layers - own - (0 if has_first else self.distinct)
        ends = [(int(FIRST in blocks), self.first), (int(has_last), self.last)]
        return _sum([(own, self.block), (others, self.elsewhere), *ends, (1, self.constant)])


def trace_optimizer_steps(experiment: Experiment, *, cuda: bool) -> OptimizerStepsByStage:
    """Trace optimizer steps of small models: with one and two layers, or of small pipeline ranks."""

    pp, spec = 3 if experiment.parallelism.pp > 1 else 1, model_spec(experiment.model)
    distinct = 0 if spec is None else spec.distinct_layers
    few = distinct + 1
    # Gradients of several micro-batches are summed in fp32.
    micro_batches = min(ResolvedLayout.of(experiment).gradient_accumulation, 2) if pp == 1 else 1

    def totals(rank: int, *layers: int) -> OptimizerStepTotals:
        without = replace(experiment.activation_checkpoint, mode="none")
        small = small_run(experiment, layers, micro_batches, without, pp=pp)
        return trace_optimizer_step(small, rank * ResolvedLayout.of(small).world_size // pp, cuda=cuda).totals

    if pp == 1:
        one, two, none = totals(0, few), totals(0, few + 1), _sum([])
        block = _sum([(-1, one), (1, two)])
        return OptimizerStepsByStage(_sum([(1, one), (-few, block)]), block, none, none, none, distinct)
    ends, one, tail = (totals(rank, few, 1, 1) for rank in range(pp))
    block = _sum([(-1, one), (1, totals(1, few, 2, 1))])
    elsewhere = _sum([(-1, one), (1, totals(1, few, 1, 2))]) if spec is not None and spec.has_experts else _sum([])
    constant = _sum([(1, one), (-1, block), (-2, elsewhere)])
    first = _sum([(1, ends), (-1, constant), (-few, block), (-2, elsewhere)])
    return OptimizerStepsByStage(constant, block, first, _sum([(-1, one), (1, tail)]), elsewhere, distinct)


def trace_optimizer_step(experiment: Experiment, rank: int, *, cuda: bool) -> OptimizerStepTrace:
    """Trace the setup of a global rank and two optimizer steps."""
    tracker = SegmentTracker()
    with fake_rank(experiment, rank) as fake:
        trace = trace_step(
            fake.state, lambda: _run_optimizer_step(fake), preallocated=fake.preallocated, cuda=cuda, segments=tracker
        )
        segments, built = tracker.segments(), fake.state.built
    ends, others = list[Sequence[Segment]](), list[Sequence[int]]()
    for step, gradients in enumerate(tracker.reduced_gradients):
        own = [segment for segment in segments if segment.step == step]
        first = next(place for place, segment in enumerate(own) if segment.label == OPTIMIZER_STEP)
        made = {event.allocation for segment in own[:first] for event in segment.events if event.size}
        others.append(sorted(made - set(gradients.values())))
        ends.append(own[first:])
    names = [{allocation: name for name, allocation in gradients.items()} for gradients in tracker.reduced_gradients]
    setup = [segment for segment in segments if segment.step < 0]
    kept, other = (category_bytes({name: trace.persistent[name] for name in of}) for of in (KEPT, ("other",)))
    return OptimizerStepTrace(setup, ends, names, others, kept, other, built.parameters, built.flops_per_token)


def _sum(terms: Sequence[tuple[int, OptimizerStepTotals]]) -> OptimizerStepTotals:
    """Sum of totals with integer weights."""
    return OptimizerStepTotals(
        sum((times * totals.persistent for times, totals in terms), category_bytes({})),
        sum((times * totals.other for times, totals in terms), category_bytes({})),
        sum(times * totals.peak for times, totals in terms),
        sum_costs([sum_costs([totals.costs], times) for times, totals in terms]),
    )


def _run_optimizer_step(fake: FakeRank) -> None:
    state = fake.state

    def no_passes(*_: Any) -> Mapping[str, torch.Tensor]:
        for weight in state.model.parameters():
            weight.grad = torch.empty_like(weight, dtype=state.model.weights.gradient_dtype(weight))
        return MetricSums(state.model.objective, state.mesh.device).values

    model: Any = SimpleNamespace(
        parts=state.model.parts,
        weights=state.model.weights,
        parameters=state.model.parameters,
        unique_parameters=state.model.unique_parameters,
        forward_backward=no_passes,
        load=state.model.load,
    )
    train_step(
        model,
        state.optimizer,
        [],
        tokens=[1],
        lr=fake.experiment.optimizer.lr,
        max_grad_norm=fake.experiment.training.max_grad_norm,
        mesh=state.mesh,
    )
