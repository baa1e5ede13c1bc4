"""Trace of the optimizer step: gradient clipping, the update, and released gradients.

It depends only on a rank's layers, so it is traced without forward and backward, with empty gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.fake_world import fake_rank
from titan_exp.plan.trace.segments import (
    SYNCHRONIZATION,
    GradientKey,
    Segment,
    SegmentTracker,
    sum_costs,
)
from titan_exp.plan.trace.step_position import OPTIMIZER_STEP, TIED_SUM
from titan_exp.plan.trace.trace_step import trace_step

_TRACES: dict[tuple[str, int, bool], "OptimizerStepTrace"] = {}
"""Traces of the process by run, global rank and device type."""


@dataclass(frozen=True)
class OptimizerStepTrace:
    """Setup and two optimizer steps of a rank, traced without passes."""

    setup: Sequence[Segment]
    """Before the first step."""
    ends: Sequence[Sequence[Segment]]
    """Each optimizer step, from reduced gradients to the next step."""
    gradients: Sequence[Mapping[int, GradientKey]]
    """Parameters by the allocations of their placeholder gradients, for each step."""
    others: Sequence[Sequence[int]]
    """Other prior allocations in order, for each step: placeholder metrics, and everything else that the step reads."""
    costs: OpCosts
    """Costs of the second step, without a synchronization."""
    parameters: int
    """Parameters of the whole model."""
    flops_per_token: float
    """FLOPs of a training step per token, of the whole model."""
    on_host: dict[str, int] | None
    """Bytes of tensors on the host between steps, by category, with offloaded parameters."""


def trace_optimizer_step(experiment: Experiment, rank: int, *, cuda: bool) -> OptimizerStepTrace:
    """Trace the setup of a global rank and two optimizer steps, once for layouts that share them."""
    if not _holds_batches(experiment):
        experiment = _without_passes(experiment)
    key = repr(experiment), rank, cuda
    if key not in _TRACES:
        _TRACES[key] = _trace(experiment, rank, cuda=cuda)
    return _TRACES[key]


def _holds_batches(experiment: Experiment) -> bool:
    """True if a rank holds the batches of a step before it, on its device or beside it: other GPUs hold copies."""
    spec, on_gpu = model_spec(experiment.model), ResolvedLayout.of(experiment).device_type == "cuda"
    return not on_gpu or experiment.parallelism.cpu_offload or (spec is not None and spec.latents is not None)


def _without_passes(experiment: Experiment) -> Experiment:
    """Variant of a run with equal optimizer steps: gradients of several micro-batches are summed in fp32."""
    layout = ResolvedLayout.of(experiment)
    number = layout.gradient_accumulation if layout.parallelism.pp > 1 else min(layout.gradient_accumulation, 2)
    batch = layout.dp_degree * number
    training = replace(experiment.training, micro_batch_size=1, global_batch_size=batch, batch_ramp=())
    without = replace(experiment.activation_checkpoint, mode="none")
    return replace(experiment, training=training, activation_checkpoint=without)


def _trace(experiment: Experiment, rank: int, *, cuda: bool) -> OptimizerStepTrace:
    tracker = SegmentTracker()
    with fake_rank(experiment, rank) as fake:
        trace = trace_step(
            fake.state,
            fake.optimizer_step,
            outer_step=fake.outer_step,
            preallocated=fake.preallocated,
            cuda=cuda,
            segments=tracker,
        )
        segments, built = tracker.segments(), fake.state.built
    ends, others = list[Sequence[Segment]](), list[Sequence[int]]()
    for step, gradients in enumerate(tracker.reduced_gradients):
        own = [segment for segment in segments if segment.position.step == step]
        first = next(place for place, segment in enumerate(own) if segment.position.part in (TIED_SUM, OPTIMIZER_STEP))
        made = {event.allocation for segment in own[:first] for event in segment.events if event.size}
        others.append(sorted(made - set(gradients.values())))
        ends.append(own[first:])
    names = [{allocation: name for name, allocation in gradients.items()} for gradients in tracker.reduced_gradients]
    setup = [segment for segment in segments if segment.position.step < 0]
    costs = sum_costs(segment.costs for segment in ends[1] if segment.where != SYNCHRONIZATION)
    model = built.parameters, built.flops_per_token, trace.host and trace.host.persistent
    return OptimizerStepTrace(setup, ends, names, others, costs, *model)
