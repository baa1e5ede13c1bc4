"""Trace of the optimizer step: gradient clipping, the update, and released gradients.

It depends only on a rank's layers, so it is traced without forward and backward, with empty gradients.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan.cuda.caching_allocator import MIN_BLOCK
from titan_exp.plan.extrapolate.layer_kinds import last_layers, repetition
from titan_exp.plan.extrapolate.small_run import small_run
from titan_exp.plan.extrapolate.stages import FIRST, LAST, WHOLE, ExtrapolationError
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.fake_world import fake_rank
from titan_exp.plan.trace.segments import (
    SYNCHRONIZATION,
    CategoryBytes,
    GradientKey,
    Segment,
    SegmentTracker,
    category_bytes,
    join_segments,
    sum_costs,
)
from titan_exp.plan.trace.step_position import OPTIMIZER_STEP, TIED_SUM
from titan_exp.plan.trace.trace_step import trace_step
from titan_exp.trainer.train_state import TrainState

_TRACES: dict[tuple[str, int, bool], "OptimizerStepTrace"] = {}
"""Traces of the process by run, global rank and device type."""
KEPT = ("parameters", "gathered parameters", "optimizer")
"""Categories of memory between steps: masters, compute weights on one data rank, optimizer state."""
_IS_KEPT = category_bytes(dict.fromkeys(KEPT, 1))


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
    persistent: CategoryBytes
    """Bytes of `KEPT` memory, without `shared`."""
    other: CategoryBytes
    """Other bytes between steps, e.g. of buffers, without `shared`."""
    shared: CategoryBytes
    """Bytes of storages of all layers, one per category, before they are rounded up: counts of experts' tokens, and
    AdaGC's averages, which are optimizer state."""
    parameters: int
    """Parameters of the whole model."""
    flops_per_token: float
    """FLOPs of a training step per token, of the whole model."""
    on_host: dict[str, int] | None
    """Bytes of tensors on the host between steps, by category, with offloaded parameters."""

    @property
    def totals(self) -> "OptimizerStepTotals":
        """Totals of the second optimizer step. Without a synchronization: fragments are not linear in the layers."""
        steps = [segment for segment in self.ends[1] if segment.where != SYNCHRONIZATION]
        tied, step = (
            join_segments([segment for segment in steps if segment.position.part == part])
            for part in (TIED_SUM, OPTIMIZER_STEP)
        )
        costs = sum_costs([tied.costs, step.costs])
        return OptimizerStepTotals(self.persistent, self.other, self.shared, tied.peak, step.peak, step.where, costs)


@dataclass(frozen=True)
class OptimizerStepTotals:
    """Totals of an optimizer step, or a stage's contribution to them."""

    persistent: CategoryBytes
    """Bytes of `KEPT` memory."""
    other: CategoryBytes
    """Other bytes between steps."""
    shared: CategoryBytes
    """Bytes of storages of all layers before they are rounded up; once they are, `persistent` and `other` include them.
    """
    tied: CategoryBytes
    """Bytes added by the sum of tied gradients before it."""
    peak: CategoryBytes
    """Bytes added at its peak."""
    where: str
    """Phase of the peak."""
    costs: OpCosts
    """FLOPs, memory traffic and messages."""


@dataclass(frozen=True)
class OptimizerStepsByStage:
    """Optimizer step of any rank, as a linear function of its stages."""

    constant: OptimizerStepTotals
    """Constant part."""
    block: OptimizerStepTotals
    """Added by a period of blocks."""
    first: OptimizerStepTotals
    """Added by the embedding of a pipeline."""
    last_stage: OptimizerStepTotals
    """Added by the head of a pipeline, and its last layers."""
    both: OptimizerStepTotals
    """Peak and costs added besides on a rank with both ends, of which the optimizer updates equal tensors together."""
    elsewhere: OptimizerStepTotals
    """Added by a period of blocks of another rank, whose counts of experts' tokens are summed."""
    distinct: int
    """Number of first blocks that differ from the rest, which are counted in `constant` or `first`."""
    period: int
    """Number of other blocks after which their kinds repeat."""
    last: int
    """Number of last layers that differ from the rest, which are counted in `constant` or `last_stage`."""
    granularity: int
    """Bytes to which sizes of storages are rounded up."""

    def of(self, blocks: Mapping[str, int], layers: int) -> OptimizerStepTotals:
        """Optimizer step of a rank with the given number of blocks by kind of stage, in a model of `layers`.

        Neither counts the last layers that differ.
        """
        has_first, has_last, own = FIRST in blocks or WHOLE in blocks, LAST in blocks, sum(blocks.values())
        others = layers - own - (0 if has_first else self.distinct)
        ends = [(int(FIRST in blocks), self.first), (int(has_last), self.last_stage)]
        ends.append((int(FIRST in blocks and has_last), self.both))
        counts = [(own // self.period, self.block), (others // self.period, self.elsewhere)]
        total = _sum([*counts, *ends, (1, self.constant)])
        rounded = -(-total.shared // self.granularity) * self.granularity
        kept = rounded * _IS_KEPT
        return replace(total, persistent=total.persistent + kept, other=total.other + rounded - kept)


def trace_optimizer_steps(experiment: Experiment, *, cuda: bool) -> OptimizerStepsByStage:
    """Trace optimizer steps of small models: with one and two periods of layers, or of small pipeline ranks.

    Raises:
        ExtrapolationError: totals are not a linear function of the number of layers.
    """
    pp, spec = 3 if experiment.parallelism.pp > 1 else 1, model_spec(experiment.model)
    (distinct, period), last = repetition(experiment), last_layers(experiment)
    few, kinds = distinct + period, (distinct, period, last, MIN_BLOCK if cuda else 1)
    is_linear = experiment.optimizer.is_homogeneous and experiment.grad_clip.mode == "norm"
    # Gradients of several micro-batches are summed in fp32.
    micro_batches = min(ResolvedLayout.of(experiment).gradient_accumulation, 2) if pp == 1 else 1

    def totals(rank: int, *layers: int, pp: int = pp, schedule: str = "1F1B") -> OptimizerStepTotals:
        small = small_run(experiment, layers, micro_batches, experiment.activation_checkpoint, pp=pp, schedule=schedule)
        global_rank = rank * ResolvedLayout.of(small).world_size // pp
        return trace_optimizer_step(small, global_rank, cuda=cuda).totals

    if pp == 1:
        few += (experiment.model.layers - last - few) % period
        one, two, none = totals(0, few + last), totals(0, few + last + period), _sum([])
        block = _difference(two, one)
        if not is_linear:
            _check_linear(experiment, block, _difference(totals(0, few + last + 2 * period), two))
        constant = _sum([(1, one), (-(few // period), block)])
        return OptimizerStepsByStage(constant, block, none, none, none, none, *kinds)
    ends, one, tail = (totals(rank, few, period, period + last) for rank in range(pp))
    two = totals(1, few, 2 * period, period + last)
    block = _difference(two, one)
    if not is_linear:
        _check_linear(experiment, block, _difference(totals(1, few, 3 * period, period + last), two))
    has_experts = spec is not None and spec.has_experts
    elsewhere = _difference(totals(1, few, period, 2 * period + last), one) if has_experts else _sum([])
    constant = _sum([(1, one), (-1, block), (-2, elsewhere)])
    first = _sum([(1, ends), (-1, constant), (-(few // period), block), (-2, elsewhere)])
    last_stage, both, placement = _difference(tail, one), _sum([]), ResolvedLayout.of(experiment).stage_placement
    if placement[0] == placement[-1]:
        ends_alone = totals(0, few, period, period, period + last, pp=2, schedule="ZBVZeroBubble")
        apart = _sum([(1, constant), (few // period + 1, block), (1, first), (1, last_stage), (2, elsewhere)])
        both = replace(both, peak=ends_alone.peak - apart.peak, costs=_difference(ends_alone, apart).costs)
    return OptimizerStepsByStage(constant, block, first, last_stage, both, elsewhere, *kinds)


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
        of_layers = {name: tensor for name, tensor in _shared_tensors(fake.state) if not tracker.is_on_host(tensor)}
        shared = category_bytes({name: tensor.untyped_storage().nbytes() for name, tensor in of_layers.items()})
        rounded = category_bytes({name: tracker.tracked_bytes([tensor]) for name, tensor in of_layers.items()})
    ends, others = list[Sequence[Segment]](), list[Sequence[int]]()
    for step, gradients in enumerate(tracker.reduced_gradients):
        own = [segment for segment in segments if segment.position.step == step]
        first = next(place for place, segment in enumerate(own) if segment.position.part in (TIED_SUM, OPTIMIZER_STEP))
        made = {event.allocation for segment in own[:first] for event in segment.events if event.size}
        others.append(sorted(made - set(gradients.values())))
        ends.append(own[first:])
    names = [{allocation: name for name, allocation in gradients.items()} for gradients in tracker.reduced_gradients]
    setup = [segment for segment in segments if segment.position.step < 0]
    held = category_bytes(trace.persistent) - rounded
    kept, other = held * _IS_KEPT, held * category_bytes({"other": 1})
    model = built.parameters, built.flops_per_token, trace.host and trace.host.persistent
    return OptimizerStepTrace(setup, ends, names, others, kept, other, shared, *model)


def _shared_tensors(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Storages of all layers, with their categories."""
    if (load := state.model.load) is not None and load.counts:
        yield "other", next(iter(load.counts.values()))
    if state.clipper is not None and (averages := state.clipper.averages) is not None:
        yield "optimizer", averages


def _check_linear(experiment: Experiment, one: OptimizerStepTotals, another: OptimizerStepTotals) -> None:
    """Check that every period of layers adds the same totals."""
    kept, others = ((*each.persistent, *each.other, *each.shared, *each.peak, each.costs) for each in (one, another))
    if kept != others:
        raise ExtrapolationError(
            f"the step of optimizer.name={experiment.optimizer.name} is no linear function of the number of layers, "
            f"with grad_clip.mode={experiment.grad_clip.mode}"
        )


def _difference(more: OptimizerStepTotals, fewer: OptimizerStepTotals) -> OptimizerStepTotals:
    return _sum([(-1, fewer), (1, more)])


def _sum(terms: Sequence[tuple[int, OptimizerStepTotals]]) -> OptimizerStepTotals:
    """Sum of totals with integer weights."""
    return OptimizerStepTotals(
        sum((times * totals.persistent for times, totals in terms), category_bytes({})),
        sum((times * totals.other for times, totals in terms), category_bytes({})),
        sum((times * totals.shared for times, totals in terms), category_bytes({})),
        sum((times * totals.tied for times, totals in terms), category_bytes({})),
        sum((times * totals.peak for times, totals in terms), category_bytes({})),
        terms[0][1].where if terms else "",
        sum_costs([sum_costs([totals.costs], times) for times, totals in terms]),
    )
