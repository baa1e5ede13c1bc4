"""Samples: traced steps of small models, cut into segments by position. A full step is made of them.

Without a pipeline, a sample has five layers and three micro-batches. With a pipeline, it is a synthetic rank with every
kind of stage and action, first and repeated; the schedule simulation tracks the hidden states that stages exchange.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.groups.parallelism import ActivationCheckpointConfig
from titan_exp.config.layout.pipeline_schedules import Action
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.models.spec.lookup import model_spec, mtp_depth
from titan_exp.parallel.pipeline_runtime import ActivationSpec
from titan_exp.plan.extrapolate import eligibility, schedule
from titan_exp.plan.extrapolate.schedule import ExtrapolationError, SampledPart, SampleKey, StageShape
from titan_exp.plan.trace import segments as step_parts
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.segments import PROLOGUES, GradientKey, Segment, SegmentTracker, StepPosition, sum_costs
from titan_exp.plan.trace.torch_patches import uses_inductor
from titan_exp.plan.trace.trace_step import DEVICE, fake_rank
from titan_exp.tracking.run_folder.files import temporary_folder


class StorageKey(NamedTuple):
    """Key of a segment's storages; order distinguishes equal keys."""

    size: int
    role: int
    category: str
    output: bool


class AllocationSite(NamedTuple):
    """Allocation of a storage that outlives its segment."""

    position: StepPosition
    key: StorageKey
    place: int
    """Index among storages with the same key, counted from the last, since the first block also gathers for itself."""
    first: int
    """Index from the first, for parts outside blocks, as a first micro-batch adds gradients of the head's weights."""


@dataclass(frozen=True)
class Sample:
    """Two traced steps of a small model."""

    segments: Mapping[StepPosition, Sequence[Segment]]
    blocks: Mapping[int, int]  # number of blocks by stage number
    distinct: int  # number of first blocks that differ from the rest
    period: int  # period in which the kinds of the other blocks repeat
    edge: int  # blocks at each end of a stage that are not repeated
    last: int  # number of last blocks of the model that differ from the rest, as in `eligibility.last_blocks`
    micro_batches: int
    hidden: Sequence[tuple[int, str]]  # bytes and category of hidden states, by kind, as in `ScheduleSimulation`
    sends_complete: bool
    message: OpCosts  # costs of one send and one receive
    gradients: Sequence[Mapping[GradientKey, int]]
    hidden_states: frozenset[int]  # allocations of hidden states passed between stages
    results: Mapping[StepPosition, int]
    saved_calls: tuple[str, ...]  # automatic lists of saved calls in selective activation checkpointing, in words

    @cached_property
    def stages(self) -> list[int]:
        """Stage numbers of the sampled rank."""
        return [stage for stage in self.blocks if stage != schedule.OTHER_RANK]

    def last_of(self, stage: int) -> int:
        """Number of last blocks that differ from the rest in a stage."""
        return self.last if stage == self.stages[-1] else 0

    def distinct_of(self, stage: int) -> int:
        """Number of first blocks that differ from the rest in a stage."""
        return 0 if stage else self.distinct

    def block_like(self, stage: StageShape, place: int) -> tuple[int, int]:
        """Sampled stage and block that a stage's block repeats. Where possible, blocks count from the nearer end,
        because blocks prefetch and reduce for their neighbours."""
        sampled, last, count = stage.sampled, self.last_of(stage.sampled), len(stage.modes)
        left, alike = count - last - place, place - self.distinct_of(sampled)
        if alike <= 0 or self.blocks[sampled] == count or (alike < self.edge < left):
            return sampled, place
        if left <= self.edge:
            return sampled, self.blocks[sampled] - last - left
        middle = self.edge + (alike - self.edge) % self.period
        if self.blocks[sampled] - last - self.distinct_of(sampled) >= 2 * self.edge + self.period:
            return sampled, self.distinct_of(sampled) + middle
        return schedule.SAMPLED_STAGES[schedule.MIDDLE], middle

    def action_parts(self, stage: StageShape, kind: str) -> Iterator[SampledPart]:
        """Parts of a stage's action in execution order."""
        places = range(len(stage.modes))
        yield SampledPart(stage.mode(0 if kind == "F" else -1), stage.sampled, None, f"{kind} before", None)
        for place in places if kind == "F" else reversed(places):
            yield SampledPart(stage.modes[place], *self.block_like(stage, place), f"{kind} block", place)
        yield SampledPart(stage.last_mode(kind), stage.sampled, None, f"{kind} after", None)
        if kind in "IW":
            yield SampledPart(stage.last_mode(kind), stage.sampled, -1, kind + step_parts.SUM, -1)
            for place in places:
                yield SampledPart(stage.modes[place], *self.block_like(stage, place), kind + step_parts.SUM, place)

    def reduction_parts(self, stage: StageShape) -> Iterator[SampledPart]:
        """Parts of a stage's gradient reduction, in order. A sample has groups only if FSDP shards parameters."""
        yield SampledPart(0, stage.sampled, None, step_parts.REDUCE, None)
        yield SampledPart(0, stage.sampled, -1, step_parts.GROUP, -1)
        for place in range(len(stage.modes)):
            yield SampledPart(0, *self.block_like(stage, place), step_parts.GROUP, place)
        yield SampledPart(0, stage.sampled, None, step_parts.REST, None)

    @property
    def last_micro(self) -> int | None:
        """Last micro-batch; None in a pipeline, where it may be a repeated one."""
        return None if schedule.OTHER_RANK in self.blocks else self.micro_batches - 1

    @cached_property
    def roles(self) -> dict[tuple[int, int], int]:
        """Index of each stream within its stage, in order of first use, by stage and stream number. `HOST` memory
        counts as a stream."""
        roles: dict[tuple[int, int], int] = {}
        used: Counter[int] = Counter()
        for position, segments in self.segments.items():
            for event in (event for segment in segments for event in segment.events):
                if event.size and (position.stage, event.stream) not in roles:
                    is_other = event.stream > 0
                    roles[position.stage, event.stream] = used[position.stage] + 1 if is_other else event.stream
                    used[position.stage] += is_other
        return roles

    @cached_property
    def sites(self) -> dict[int, AllocationSite]:
        """Allocations that outlive their segments."""
        sites: dict[int, AllocationSite] = {}
        for position, segments in self.segments.items():
            events = [event for segment in segments for event in segment.events]
            released = {event.allocation for event in events if not event.size}
            keys = {
                event.allocation: StorageKey(
                    event.size, self.roles[position.stage, event.stream], event.category, event.output
                )
                for event in events
                if event.size and event.allocation not in released
            }
            counts, seen = Counter(keys.values()), Counter[StorageKey]()
            for allocation, key in keys.items():
                sites[allocation] = AllocationSite(position, key, seen[key] - counts[key], seen[key])
                seen[key] += 1
        return sites

    def metrics(self, step: int) -> list[int]:
        """Allocations of a step's loss and other metrics, in order: made in its prologue, released by no pass."""
        own = [segment for at, segments in self.segments.items() if at.step == step for segment in segments]
        freed = {event.allocation for segment in own for event in segment.events if not event.size}
        return sorted(
            name for name, site in self.sites.items() if site.position == PROLOGUES[step] and name not in freed
        )


Samples = Mapping[SampleKey, Sequence[Sample]]  # one sample per activation checkpointing mode, for stages of each key


def take_sample(
    experiment: Experiment, checkpointing: ActivationCheckpointConfig, key: SampleKey, *, cuda: bool
) -> Sample:
    """Trace a small model in a run's layout, with the same activation checkpointing for all blocks."""
    pipeline, tracker = experiment.parallelism.pp > 1, SegmentTracker()
    distinct, period, _ = eligibility.repetition(experiment)
    with temporary_folder() as folder:
        small, blocks = _small_model(experiment, checkpointing, folder / "schedule.csv", key)
        with fake_rank(small, 0) as fake:
            # The first step runs in full with a pipeline.
            warmup = {"warmup_step": None} if pipeline else {}
            trace = fake.trace(cuda=cuda, inductor=uses_inductor(experiment.compile), segments=tracker, **warmup)
            micro_batches = len(fake.batches)
            # On CUDA the host observes the completion of a send late (`simulate_rank`).
            sent = dist.isend(torch.empty(1), dst=1) if pipeline and not cuda else None
            sends_complete = sent is not None and sent.is_completed()
    positions, between = _segments_of_passes(tracker.segments(), blocks)
    hidden_states = _allocations_of_hidden_states(tracker.action_results.values(), between, positions)
    return Sample(
        segments=positions,
        blocks=blocks,
        distinct=distinct,
        period=period,
        edge=eligibility.sampled_edge(experiment),
        last=eligibility.last_blocks(experiment),
        micro_batches=micro_batches,
        hidden=_hidden_states(tracker, small) if pipeline else (),
        message=_message(sum_costs(segment.costs for segment in between if segment.position.step == 1)),
        sends_complete=sends_complete,
        gradients=tracker.reduced_gradients,
        hidden_states=hidden_states,
        results=tracker.action_results,
        saved_calls=trace.saved_calls,
    )


def _small_model(
    experiment: Experiment, checkpointing: ActivationCheckpointConfig, path: Path, key: SampleKey
) -> tuple[Experiment, dict[int, int]]:
    """Small variant of a run, and its number of blocks by stage. A pipeline's schedule, with forward and backward of
    single micro-batches, is written to a file."""
    if experiment.parallelism.pp == 1:
        few = min(ResolvedLayout.of(experiment).gradient_accumulation, eligibility.SAMPLED_MICRO_BATCHES)
        number = eligibility.sampled_layers(experiment)
        small = eligibility.small_run(experiment, [number], few, checkpointing)
        return small, {0: number + mtp_depth(experiment.model)}
    first, middle, last = eligibility.sampled_stages(experiment, key.size)
    _, period, differing = eligibility.repetition(experiment)
    counts, lines = [first, middle, period, last + differing], ""
    for own in ([0, 1, 3], [schedule.OTHER_RANK]):
        passes = [(kind, number, own if kind == "F" else own[::-1]) for kind, number in key.order]
        order = [Action(stage, kind, number) for kind, number, stages in passes for stage in stages]
        lines += ",".join(map(str, order)) + "\n"
    path.write_text(lines)
    small = eligibility.small_run(experiment, counts, len(key.ways), checkpointing, pp=2, schedule=str(path))
    return small, dict(enumerate([first, middle, period, last + eligibility.last_blocks(experiment)]))


def _segments_of_passes(
    segments: Iterable[Segment], blocks: Mapping[int, int]
) -> tuple[dict[StepPosition, list[Segment]], list[Segment]]:
    """Segments before the optimizer step, by position, and the segments of messages between actions. Blocks are
    numbered within their stage; `blocks` has their number per stage. Parameter groups are numbered likewise; the group
    of a stage's other parameters comes first, as -1."""
    passes, between = defaultdict[StepPosition, list[Segment]](list), list[Segment]()
    for segment in segments:
        part = segment.position.part
        if part.endswith(step_parts.BETWEEN):
            between.append(segment)
        elif segment.position.step >= 0 and part not in (step_parts.TIED_SUM, step_parts.OPTIMIZER_STEP):
            passes[segment.position].append(segment)
    groups = Counter(position._replace(block=None) for position in passes if _is_group(position))

    def in_stage(position: StepPosition) -> StepPosition:
        if position.block is None:
            return position
        before = sum(blocks[stage] for stage in range(position.stage))
        if _is_group(position):
            before = groups[position._replace(block=None)] - blocks[position.stage]
        return position._replace(block=position.block - before)

    return {in_stage(position): found for position, found in passes.items()}, between


def _allocations_of_hidden_states(
    results: Collection[int], between: Iterable[Segment], passes: Mapping[StepPosition, Sequence[Segment]]
) -> frozenset[int]:
    """Allocations of hidden states: results of actions, and allocations by messages between actions. As the simulation
    assumes, messages release nothing else, and actions release them last."""
    events = [event for segment in between for event in segment.events]
    hidden = frozenset((*results, *(event.allocation for event in events if event.size)))
    if any(not event.size and event.allocation > 0 and event.allocation not in hidden for event in events):
        raise ExtrapolationError("more than hidden states is released between actions")
    over: set[StepPosition] = set()
    for position, found in passes.items():
        action = position._replace(part=position.part[:1], block=None)
        for event in (event for segment in found for event in segment.events):
            is_hidden = not event.size and event.allocation in hidden
            if action in over and not is_hidden:
                raise ExtrapolationError("an action releases other storages after hidden states")
            if is_hidden:
                over.add(action)
    return hidden


def _is_group(position: StepPosition) -> bool:
    return position.part == step_parts.GROUP or position.part.endswith(step_parts.SUM)


def _hidden_states(tracker: SegmentTracker, experiment: Experiment) -> list[tuple[int, str]]:
    """Bytes and category of hidden states, by kind as in `schedule.KINDS`."""
    spec = model_spec(experiment.model)
    hidden = ActivationSpec.of(ResolvedLayout.of(experiment), DEVICE, spec.pipeline.extra_tokens if spec else 0)
    whole, grain = torch.Size(hidden.shape).numel() * hidden.dtype.itemsize, tracker.granularity
    sizes = {"communication": whole, "activations": whole, "loss": torch.float32.itemsize}
    return [(-(-size // grain) * grain, category) for category, size in sizes.items()]


def _message(costs: OpCosts) -> OpCosts:
    """Costs of one message, from several, each of one send and one receive."""
    sent, share = sum(calls for (_, kind), calls in costs.calls.items() if kind == "send"), OpCosts()
    if sent:
        share.bytes_moved, share.operators = costs.bytes_moved // sent, costs.operators // sent
        share.kernels.update({kernel: count // sent for kernel, count in costs.kernels.items()})
    for key, size in costs.messages.items():
        share.messages[key], share.calls[key] = size // sent, costs.calls[key] // sent
    return share
