"""Trace of the optimizer step: gradient clipping, the update, and released gradients.

It depends only on a rank's layers, so we trace it without forward and backward, on empty gradients. For a deep model
without a pipeline, we unroll it from the steps of three small models, each larger by one period of layers. A sequence
has runs of periods; a larger model adds one period at the end of each run. Numbers in it, such as the number or size of
an allocation, are linear in the period's index and in the number of periods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec
from titan_exp.plan.extrapolate.eligibility import repetition, small_run
from titan_exp.plan.extrapolate.schedule import ExtrapolationError
from titan_exp.plan.prediction import exchange_of
from titan_exp.plan.trace import segments as step_parts
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.segments import AllocationEvent, GradientKey, Segment, SegmentTracker, sum_costs
from titan_exp.plan.trace.trace_step import fake_rank


class Token(NamedTuple):
    """Element of a sequence."""

    kind: tuple[Any, ...]
    numbers: tuple[int, ...] = ()


def unroll(sequences: Sequence[Sequence[Token]], periods: int) -> list[Token]:
    """Unroll a sequence to `periods` more periods than the first of three; the second has one more, the third two more.
    Raises ExtrapolationError if a number is not linear, or a model adds more than a period."""
    first, second, third = sequences
    if len(third) - len(second) != len(second) - len(first):
        raise ExtrapolationError("a sequence of the optimizer step grows by another period each time")
    found, one, two = list[Token](), 0, 0
    for place, length in enumerate(_added(first, second, third)):
        triples = list(zip(second[one : one + length], third[two : two + length], third[two + length :], strict=False))
        found += [_in_period(*triple, number, periods) for number in range(periods) for triple in triples]
        one, two = one + length, two + 2 * length
        if place < len(first):
            before, after = first[place], second[one].numbers
            numbers = (x + (y - x) * periods for x, y in zip(before.numbers, after, strict=True))
            found.append(Token(before.kind, tuple(numbers)))
            one, two = one + 1, two + 1
    return found


def _in_period(alone: Token, early: Token, late: Token, period: int, periods: int) -> Token:
    """Token of an added period, from the only added period's token (`alone`) and the tokens of two added periods."""
    triples = zip(alone.numbers, early.numbers, late.numbers, strict=True)
    return Token(alone.kind, tuple(x + (y - x) * (periods - 1) + (z - y) * period for x, y, z in triples))


def _added(first: Sequence[Token], second: Sequence[Token], third: Sequence[Token]) -> list[int]:
    """Number of tokens that the second sequence adds before each token of the first, and at the end; the third adds
    twice as many. Chooses the fewest places so that periods continue those before and all other numbers are linear."""
    most, reached = len(second) - len(first), {0: (0, None)}
    for place in range(len(first) + 1):
        following: dict[int, tuple[int, Any]] = {}
        for after in range(most + 1):
            if place < len(first) and not _is_linear(first[place], second[place + after], third[place + 2 * after]):
                continue
            ways = (
                (cost + (after > before), (way, after - before))
                for before, (cost, way) in reached.items()
                if after == before
                or (after > before and _continues(second, third, place + before, place + 2 * before, after - before))
            )
            if (way := min(ways, key=itemgetter(0), default=None)) is not None:
                following[after] = way
        reached = following
    if most not in reached:
        raise ExtrapolationError("the optimizer step is not linear in the number of layers")
    (_, way), found = reached[most], list[int]()
    while way is not None:
        way, length = way
        found.append(length)
    return found[::-1]


def _is_linear(none: Token, one: Token, two: Token) -> bool:
    if not none.kind == one.kind == two.kind:
        return False
    return all(z - y == y - x for x, y, z in zip(none.numbers, one.numbers, two.numbers, strict=True))


def _continues(second: Sequence[Token], third: Sequence[Token], one: int, two: int, length: int) -> bool:
    """True if an added period differs from the tokens before it as the third sequence's two periods do."""
    if one < length or len(third) < two + 2 * length:
        return False
    return all(
        _is_linear(third[two - length + place], third[two + place], third[two + length + place])
        and _difference(second[one - length + place], second[one + place])
        == _difference(third[two + place], third[two + length + place])
        for place in range(length)
    )


def _difference(token: Token, other: Token) -> list[int] | None:
    if token.kind != other.kind:
        return None
    return [y - x for x, y in zip(token.numbers, other.numbers, strict=True)]


_TRACES: dict[tuple[str, int, bool], "OptimizerStepTrace"] = {}
"""Traces in this process by run, global rank and device type."""
MIN_DEPTH = 6  # number of layers beyond the deepest small model at which unrolling becomes faster than tracing


@dataclass(frozen=True)
class OptimizerStepTrace:
    """Setup and two optimizer steps of a rank, traced without passes."""

    setup: Sequence[Segment]  # segments before the first step. Sizes on the device are not rounded up, as in `ends`.
    ends: Sequence[Sequence[Segment]]  # segments of each optimizer step, from reduced gradients to the next step
    gradients: Sequence[Mapping[int, GradientKey]]
    """Parameters by the allocations of their placeholder gradients, for each step."""
    others: Sequence[Sequence[int]]
    """Other earlier allocations of each step, in order: placeholder metrics, and everything else that it reads."""
    costs: OpCosts  # costs of the second step, without the exchange between worlds
    parameters: int
    flops_per_token: float  # FLOPs of a training step per token, of the whole model
    on_host: dict[str, int] | None  # bytes of tensors on the host between steps, by category, with offloaded parameters


def trace_optimizer_step(experiment: Experiment, rank: int, *, cuda: bool) -> OptimizerStepTrace:
    """Trace the setup of a global rank and two optimizer steps, once for layouts that share them."""
    experiment = _without_passes(experiment)
    key = repr(experiment), rank, cuda
    if key not in _TRACES:
        depths = _depths(experiment)
        try:
            found = _unrolled(experiment, depths, cuda=cuda) if depths else None
        except ExtrapolationError:  # the optimizer's step is not linear in the layers
            found = None
        _TRACES[key] = found or _trace(experiment, rank, cuda=cuda)
    return _TRACES[key]


def _depths(experiment: Experiment) -> range | None:
    """Layers of three small models, a period apart, to unroll from; None if a trace is as fast or nothing repeats."""
    (distinct, period, last), layers = repetition(experiment), experiment.model.layers
    few = distinct + last + 2 * period
    few += (layers - few) % period
    if experiment.parallelism.pp > 1 or exchange_of(experiment).phase or layers < MIN_DEPTH * (few + 2 * period):
        return None
    return range(few, few + 3 * period, period)


def _unrolled(experiment: Experiment, depths: range, *, cuda: bool) -> OptimizerStepTrace:
    """Trace of a model without a pipeline, unrolled from the traces of small models. Raises ExtrapolationError if the
    step is not linear in the number of layers."""
    number = ResolvedLayout.of(experiment).gradient_accumulation
    small = [small_run(experiment, [depth], number, experiment.activation_checkpoint) for depth in depths]
    one, two, three = traces = [_trace(run, 0, cuda=cuda) for run in small]
    periods, least = (experiment.model.layers - depths.start) // depths.step, sum_costs([one.costs], -1)
    more = [sum_costs([trace.costs, least]) for trace in (two, three)]
    if sum_costs([more[1]]) != sum_costs([more[0]], 2):
        raise ExtrapolationError("costs of the optimizer step are not linear in the number of layers")
    hosts = [trace.on_host or {} for trace in traces]
    setup, ends, gradients, others = _from_tokens(unroll([_tokens(trace) for trace in traces], periods))
    return OptimizerStepTrace(
        setup,
        ends,
        gradients,
        others,
        sum_costs([one.costs, sum_costs([more[0]], periods)]),
        one.parameters + (two.parameters - one.parameters) * periods,
        one.flops_per_token + (two.flops_per_token - one.flops_per_token) * periods,
        one.on_host and {name: size + (hosts[1][name] - size) * periods for name, size in one.on_host.items()},
    )


def _tokens(trace: OptimizerStepTrace) -> list[Token]:
    found = list[Token]()
    for place, segments in enumerate((trace.setup, *trace.ends)):
        for segment in segments:
            phase = segment.where, segment.begins_phase, segment.category
            found.append(Token(("segment", place, segment.position, *phase)))
            found += [
                Token(("event", place, bool(event.size), *event[2:]), (event.allocation, event.size))
                for event in segment.events
            ]
    for step, (gradients, others) in enumerate(zip(trace.gradients, trace.others, strict=True)):
        for allocation, (part, block, name) in sorted(gradients.items()):
            found.append(Token(("gradient", step, part, block is None, name), (allocation, block or 0)))
        found += [Token(("other", step), (allocation,)) for allocation in others]
    return found


def _from_tokens(tokens: Sequence[Token]) -> tuple[Any, Any, Any, Any]:
    """Setup, ends, gradients and others of a trace, read back from its sequence."""
    segments, gradients, others = ([], [], []), ({}, {}), ([], [])
    events = list[AllocationEvent]()
    for (what, at, *rest), numbers in tokens:
        if what == "segment":
            segments[at].append(Segment(OpCosts(), *rest, events=(events := [])))
        elif what == "event":
            events.append(AllocationEvent(numbers[0], numbers[1], *rest[1:]))
        elif what == "gradient":
            part, is_outside, name = rest
            gradients[at][numbers[0]] = GradientKey(part, None if is_outside else numbers[1], name)
        else:
            others[at].append(numbers[0])
    return segments[0], segments[1:], gradients, others


def _without_passes(experiment: Experiment) -> Experiment:
    """Variant of a run with an equal optimizer step: gradients of several micro-batches are summed in fp32. Itself if a
    rank holds the batches of a step before it, on the device or beside it; other GPUs hold copies."""
    layout, spec = ResolvedLayout.of(experiment), model_spec(experiment.model)
    holds_inputs = spec is not None and spec.inputs is not None
    if layout.device_type != "cuda" or experiment.parallelism.cpu_offload or holds_inputs:
        return experiment
    number = layout.gradient_accumulation if layout.parallelism.pp > 1 else min(layout.gradient_accumulation, 2)
    batch = layout.dp_degree * number
    training = replace(experiment.training, micro_batch_size=1, global_batch_size=batch, batch_ramp=())
    without = replace(experiment.activation_checkpoint, mode="none")
    return replace(experiment, training=training, activation_checkpoint=without)


def _trace(experiment: Experiment, rank: int, *, cuda: bool) -> OptimizerStepTrace:
    tracker = SegmentTracker()
    with fake_rank(experiment, rank) as fake:
        options = {"cuda": cuda, "rounds": False, "segments": tracker}
        trace = fake.trace(fake.optimizer_step, warmup_step=None, beside=fake.exchanges, **options)
        segments, built = tracker.segments(), fake.state.built
    ends, others = list[Sequence[Segment]](), list[Sequence[int]]()
    for step, gradients in enumerate(tracker.reduced_gradients):
        own = [segment for segment in segments if segment.position.step == step]
        parts, last = [segment.position.part for segment in own], (step_parts.TIED_SUM, step_parts.OPTIMIZER_STEP)
        first = next(place for place, part in enumerate(parts) if part in last)
        made = {event.allocation for segment in own[:first] for event in segment.events if event.size}
        others.append(sorted(made - set(gradients.values())))
        ends.append(own[first:])
    names = [{allocation: name for name, allocation in gradients.items()} for gradients in tracker.reduced_gradients]
    setup = [segment for segment in segments if segment.position.step < 0]
    phase = exchange_of(experiment).phase
    costs = sum_costs(segment.costs for segment in ends[1] if segment.where != phase)
    model = built.parameters, built.flops_per_token, trace.host and trace.host.persistent
    return OptimizerStepTrace(setup, ends, names, others, costs, *model)
