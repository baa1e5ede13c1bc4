"""Evaluations in a plan: memory beyond what a rank holds between steps, time of a pass, and their number.

A pass is one call of the trainer's `loss_sum`: a micro-batch, or those of a pipeline. It is traced on the rank of the
step's trace. For an extrapolated run we trace it in small models, a period of layers apart, since memory and costs of a
forward pass without gradients are linear in the layers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.extension import loaded
from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.config.schema.data_sets import open_files, validation_sets
from titan_exp.config.schema.foreign_code import described
from titan_exp.plan.caching_allocator import Events
from titan_exp.plan.extrapolate.eligibility import repetition, sampled_edge, small_run

if TYPE_CHECKING:
    from titan_exp.plan.trace.dispatch_mode import OpCosts
    from titan_exp.plan.trace.memory_tracker import Moment
    from titan_exp.plan.trace.trace_step import FakeRank, Trace
    from titan_exp.trainer.train_state import TrainState

VALIDATION = "validation"


@dataclass(frozen=True)
class Evaluated:
    """Evaluation on one set of documents, in the plan of a run; an extension's class overrides all but the fields.
    Importing it imports no torch."""

    experiment: Experiment  # run with a resolved layout, and the data and sequence length of this evaluation
    name: str = VALIDATION
    holds_out: bool = True  # True if only held-out documents are read

    @property
    def inputs(self) -> Any:
        """JSON values that affect the memory and time of a pass, beside the keys of a training step."""
        return self.experiment.training.seq_len

    def passes(self) -> int | str:
        """Passes of a rank in an evaluation, or the reason why their number is unknown, as a clause."""
        from titan_exp.data.source_check import SMALL_BYTES
        from titan_exp.data.validation_loader import ValidationLoader

        experiment, layout = self.experiment, ResolvedLayout.of(self.experiment)
        data, kind = experiment.data, described(experiment.data.source)
        shard = {"dp_rank": 0, "dp_degree": layout.dp_degree, "micro_batch_size": layout.micro_batch_size}
        with suppress(UserError, OSError):
            files = open_files(data) if kind.holds == "text" else None
            if kind.holds == "tokens" or (files is not None and files.content.size <= SMALL_BYTES):
                length = experiment.training.seq_len
                loader = ValidationLoader(data, length, **shard, all_documents=not self.holds_out)
                group = layout.pipeline_microbatches if layout.parallelism.pp > 1 else 1
                return sum(-(-len(batches) // group) for batches in loader.sources.values())
        return "its documents are read when training begins"

    def pass_of(self, experiment: Experiment, state: "TrainState") -> Callable[[], object]:
        """Pass of a fake rank of `experiment`, which may have fewer layers than the run."""
        from titan_exp.plan.trace.trace_step import DEVICE, fake_batches

        training = replace(experiment.training, seq_len=self.experiment.training.seq_len)
        run, model = replace(experiment, training=training), state.model

        def batches() -> Sequence[Any]:
            return fake_batches(run, copied=state.mesh.device == DEVICE)[: model.eval_microbatches]

        # A batch on the host is in the memory that we plan, if that is the host's.
        made = None if ResolvedLayout.of(run).device_type == "cpu" else batches()
        return lambda: model.loss_sum(batches() if made is None else made)


def evaluated(experiment: Experiment) -> list[Evaluated]:
    """Evaluations of a run with a resolved layout: on its validation split, on its sets, and those of extensions."""
    if not experiment.evaluation.enabled:
        return []
    found = [Evaluated(experiment)]
    with suppress(UserError):  # a rule says so
        for name, run in validation_sets(experiment).items():
            found.append(Evaluated(run, f"{VALIDATION}/{name}", experiment.evaluation.sets[name].holds_out))
    return [*found, *(one for evaluations in loaded("evaluations", experiment) for one in evaluations(experiment))]


def evaluations_of(experiment: Experiment) -> int:
    """Number of evaluations in a run: those that are due, and one after the last step."""
    evaluation, training, last = experiment.evaluation, experiment.training, experiment.training.last_step
    if not evaluation.enabled:
        return 0
    if evaluation.every_tokens is None:
        return -(-last // evaluation.every)
    return sum(evaluation.due(training, step) for step in range(1, last)) + 1


@dataclass(frozen=True)
class EvaluationTrace:
    """Second pass of an evaluation on a rank."""

    name: str
    passing: "Moment"  # peak memory without what the rank holds before and after
    costs: "OpCosts"
    axes: Mapping[str, Sequence[int]]  # ranks of this rank's groups, by mesh axis of its messages
    events: Sequence[tuple[int, int, int]]
    """Allocations and releases in device memory; of an extrapolated run those of a small model."""


def trace_evaluations(
    rank: "FakeRank", kinds: Sequence[Evaluated], options: Mapping[str, Any]
) -> list[EvaluationTrace]:
    """Trace each kind of evaluation on a fake rank, with options of `trace_step`; equal passes are traced once."""
    from titan_exp.plan.trace.trace_step import trace_step
    from titan_exp.trainer import forward_backward

    traces: dict[str, Trace] = {}

    def trace(one: Evaluated) -> "Trace":
        key = repr((type(one), one.inputs))
        if key not in traces:
            work = forward_backward.evaluating(rank.state.model)(one.pass_of(rank.experiment, rank.state))
            traces[key] = trace_step(rank.state, work, **options)
        return traces[key]

    return [_of_trace(one.name, trace(one)) for one in kinds]


def _of_trace(name: str, trace: "Trace") -> EvaluationTrace:
    from titan_exp.plan.trace.memory_tracker import Moment

    # Ranks and models of other depths share this trace.
    where = re.sub(r"block \d+", "a block", trace.peak.where)
    passing = {category: size - trace.persistent[category] for category, size in trace.peak.by_category.items()}
    peak = Moment(sum(passing.values()), passing, where)
    kept, own = list[tuple[int, int, int]](), set[int]()
    for number, size, stream in trace.step_events:
        if size or number in own:  # not what was there before
            kept.append((number, size, stream))
            own.symmetric_difference_update({number})
    return EvaluationTrace(name, peak, trace.costs, trace.axes, [*kept, *((number, 0, 0) for number in sorted(own))])


def extrapolate_evaluations(
    experiment: Experiment, numbers: Sequence[int], kinds: Sequence[Evaluated], options: Mapping[str, Any]
) -> dict[int, list[EvaluationTrace]]:
    """Evaluations of pipeline ranks by their number, extrapolated from small models. Ranks between the first and the
    last stage share them if they have as many layers."""
    from titan_exp.plan.trace.trace_step import fake_rank, pipeline_ranks

    layout, (distinct, period, end) = ResolvedLayout.of(experiment), repetition(experiment)
    counts, owners, known = layout.layer_counts, layout.stage_placement, dict[object, list[EvaluationTrace]]()
    cuda, found = layout.device_type == "cuda", dict[int, list[EvaluationTrace]]()
    # Layers of each stage of the small model: as few as behave like more, and whole periods fewer than the run's.
    few, last = 2 * sampled_edge(experiment) + period, len(counts) - 1
    ends = [distinct * (stage == 0) + end * (stage == last) for stage in range(len(counts))]
    small = [count - max(0, count - own - few) // period * period for count, own in zip(counts, ends, strict=True)]

    def traced(number: int, of: Sequence[int]) -> list[EvaluationTrace]:
        own = experiment.parallelism
        without = replace(experiment.activation_checkpoint, mode="none")
        run = small_run(experiment, of, layout.gradient_accumulation, without, pp=own.pp, schedule=own.pp_schedule)
        run = replace(run, parallelism=replace(run.parallelism, pp_microbatches=own.pp_microbatches))
        with fake_rank(run, pipeline_ranks(layout)[number]) as rank:
            return trace_evaluations(rank, kinds, options)

    for number in numbers:
        own = [stage for stage, owner in enumerate(owners) if owner == number]
        key = tuple(counts[stage] for stage in own), 0 in own, last in own
        if key not in known:
            known[key] = traced(number, small)
            missing = sum(counts[stage] - small[stage] for stage in own) // period
            if missing:
                largest = max(own, key=lambda stage: counts[stage] - small[stage])
                # The allocator's events of a pipeline's many micro-batches stay those of the small model.
                further = range(1, 3 if layout.parallelism.pp == 1 and cuda else 2)
                deeper = ([n + more * period * (s == largest) for s, n in enumerate(small)] for more in further)
                groups = zip(known[key], *(traced(number, layers) for layers in deeper), strict=True)
                known[key] = [_with_layers(*group, periods=missing) for group in groups]
        found[number] = known[key]
    return found


def _with_layers(one: EvaluationTrace, more: EvaluationTrace, *most: EvaluationTrace, periods: int) -> EvaluationTrace:
    """Evaluation of a model with `periods` more periods of layers than the first trace's, from those of models with one
    and two more; without the latter, its events are the first's."""
    from titan_exp.plan.extrapolate.optimizer_step import Token, unroll
    from titan_exp.plan.extrapolate.schedule import ExtrapolationError
    from titan_exp.plan.trace.segments import sum_costs

    events = one.events
    if most:
        traces = [[Token((bool(size), stream), (number, size)) for number, size, stream in each.events]
                  for each in (one, more, *most)]  # fmt: skip
        with suppress(ExtrapolationError):
            events = [(*token.numbers, token.kind[1]) for token in unroll(traces, periods)]
    growth = {name: more.passing.by_category[name] - size for name, size in one.passing.by_category.items()}
    passing = {name: size + periods * growth[name] for name, size in one.passing.by_category.items()}
    costs = sum_costs([one.costs, sum_costs([more.costs, sum_costs([one.costs], -1)], periods)])
    peak = replace(one.passing, bytes=sum(passing.values()), by_category=passing)
    return replace(one, passing=peak, costs=costs, events=events)


def with_evaluations(trace: "Trace", evaluations: Sequence[EvaluationTrace]) -> "Trace":
    """Trace of a step that evaluations follow: its peak may be theirs, and the allocator serves them, too."""
    if not evaluations:
        return trace
    held, peak, events = trace.persistent, trace.peak, [*trace.step_events]
    for one in evaluations:
        size = sum(held.values()) + one.passing.bytes
        if size > peak.bytes:
            parts = {name: bytes_ + held[name] for name, bytes_ in one.passing.by_category.items()}
            peak = replace(peak, bytes=size, by_category=parts, where=f"{one.name}, {one.passing.where}")
        fresh = 1 + max((number for number, *_ in (*trace.setup_events, *events)), default=0)
        events += [(fresh + number, size, stream) for number, size, stream in one.events]
    return replace(trace, peak=peak, step_events=Events(events))
