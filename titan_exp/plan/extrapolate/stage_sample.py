"""A pipeline rank that has a stage of every kind and does everything that ranks do, once as its first and once again.

What its stages take is what stages of any pipeline take: hidden states, which are handed on by the schedule, are left
out of it and counted by a rehearsal (`plan/rehearsal.py`).
"""

import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.pipeline_schedules import Action, Schedule
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.parallel.pipeline_parallel import runtime as parallel_pipeline
from titan_exp.parallel.pipeline_parallel.runtime import ActivationSpec
from titan_exp.plan.extrapolate.optimizer_step import OPTIMIZER_STEP, marked_tail
from titan_exp.plan.extrapolate.schedule_simulation import KINDS, ScheduledAction, simulate_schedule
from titan_exp.plan.extrapolate.segments import (
    NOTHING,
    CategoryBytes,
    EventSegment,
    Segment,
    SegmentTracker,
    category_bytes,
    join_segments,
    sum_costs,
)
from titan_exp.plan.trace.dispatch_mode import OpCosts
from titan_exp.plan.trace.fake_world import DEVICE, FakeRank, fake_rank
from titan_exp.plan.trace.trace_step import trace_step

FIRST, MIDDLE, LAST = "first", "middle", "last"
"""Kinds of stages: with the embedding; in between; with the head."""
PASSES = 2
_CATEGORY = {"received": "communication", "made": "activations", "objective": "loss"}
TURN, OVER, REDUCE, GROUP, FINAL = "turn", "over", "reduce", "group", "final"


@dataclass(frozen=True)
class ActionSegments:
    """An action of a stage."""

    before: list[Segment]
    """Up to the first block."""
    blocks: list[Segment]
    """Of each block, in order of execution."""
    after: list[Segment]
    """The rest."""
    handed: CategoryBytes
    """Of what it leaves behind, hidden states that were handed over."""


@dataclass(frozen=True)
class StageSample:
    """A step of the rank."""

    layers: dict[str, int]
    """Blocks of its stages, by kind."""

    base: CategoryBytes
    """What is held before it, less batches and the stages' buffers."""
    buffers: CategoryBytes
    """Buffers of a stage."""
    batch: dict[str, CategoryBytes]
    """What of a micro-batch is held, by its fields."""
    sizes: list[CategoryBytes]
    """Of hidden states, by kind as in a rehearsal."""
    sends_complete: bool
    """Whether a message is known to have arrived as soon as it is sent."""
    prologue: Segment
    """What comes before the first action."""
    actions: dict[tuple[str, str, bool], ActionSegments]
    """Actions by kind of stage, kind of action, and whether it is the first of them."""
    reduction: dict[str, list[Segment]]
    """Reducing the gradients of a stage, by kind: group by group, and what follows."""
    message: OpCosts
    """Of sending and of receiving hidden states once."""
    turns: list[ScheduledAction]
    """Its actions in a step."""
    scenes: list[EventSegment]
    """Two steps as an allocator is told them; none where nobody asked."""
    reduced: list[dict[str, int]]
    """Of each step: births of reduced gradients, by the names of their parameters."""
    made: list[int]
    """Births of hidden states that actions make, in order, of both steps."""


def sampled_layers(*, lone: bool) -> dict[str, int]:
    """Blocks of each stage of the sampled rank, by kind, in order.

    Args:
        lone: whether stages of a single block are wanted, whose first block is also their last.
    """
    return {FIRST: 1, MIDDLE: 1, LAST: 1} if lone else {FIRST: 2, MIDDLE: 3, LAST: 2}


def sample_stages(experiment: Experiment, mode: str, *, lone: bool, cuda: bool, told: bool = False) -> StageSample:
    """Trace the rank in the place of one of this run's.

    Args:
        experiment: the run, its layout resolved.
        mode: how every block is recomputed.
        lone: as of `sampled_layers`.
        cuda: as of `trace_step`.
        told: whether births and deaths are wanted too.
    """
    layers = sampled_layers(lone=lone)
    kinds, placement, orders = _pipeline(layers)
    tape = SegmentTracker()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "everything.csv"
        path.write_text("\n".join(",".join(map(str, order)) for order in orders) + "\n")
        small = _small_run(experiment, [layers.get(kind, 1) for kind in kinds], str(path), mode)
        with fake_rank(small, 0) as it, marked_tail(tape), _marked_actions(tape, it):
            # What begins before the step is part of a story, in which one pass would have less.
            first, batches = (None, ()) if told else (it.warmup_step, it.batches)
            trace_step(
                it.state,
                it.step,
                warmup_step=first,
                preallocated=it.preallocated,
                batches=batches,
                cuda=cuda,
                segments=tape,
            )
            pieces = tape.pieces()
            batch = {
                field.name: tape.amount(value)
                for field in fields(it.batches[0])
                if (value := getattr(it.batches[0], field.name)) is not None
            }
            stages = [kind for kind, rank in zip(kinds, placement, strict=True) if rank == 0]
            buffers = category_bytes({"other": tape.sizes(it.state.model.parts[0].buffers())})
            base = tape.base() - len(stages) * buffers - PASSES * sum(batch.values(), category_bytes({}))
            # On CUDA the host knows late that something has left (`plan/stand_ins.py`).
            sends_complete = not cuda and _is_delivered()
            sizes, scenes = _sizes(tape, small), tape.scenes() if told else []
    known = layers, base, buffers, batch, sizes, sends_complete
    return _sorted(pieces, kinds, placement, orders, known, scenes, tape.reduced, tape.made)


def _sorted(
    pieces: Sequence[Segment], kinds: Sequence[str], placement: Sequence[int], orders: Schedule, known: Any, *story: Any
) -> StageSample:
    layers, base, buffers, batch, sizes, sends_complete = known
    rehearsal = simulate_schedule(orders, placement, 0, passes=PASSES, sends_complete=sends_complete)
    turns = iter(rehearsal.turns)
    windows: dict[tuple[str, str, bool], ActionSegments] = {}
    reduction: dict[str, list[Segment]] = {}
    prologue, between, place = list[Segment](), list[Segment](), 0
    while pieces[place].label != OPTIMIZER_STEP:
        label = pieces[place].label
        end = place + 1
        if label.startswith(TURN):
            while pieces[end].label != OVER:
                end += 1
            turn = next(turns)
            change = [after - before for after, before in zip(turn.after, turn.before, strict=True)]
            handed = sum((count * size for count, size in zip(change, sizes, strict=True)), category_bytes({}))
            key = kinds[turn.action.stage], turn.action.kind, turn.first
            windows[key] = _window(pieces[place:end], handed)
        elif label.startswith(REDUCE):
            while not (pieces[end].label.startswith(REDUCE) or pieces[end].label == OPTIMIZER_STEP):
                end += 1
            reduction[kinds[int(label.split()[1])]] = list(pieces[place:end])
        elif windows:
            between.append(pieces[place])
        else:
            prologue.append(pieces[place])
        place = end
    message = sum_costs([piece.costs for piece in between])
    each = OpCosts(bytes_moved=message.bytes_moved // rehearsal.sent, operators=message.operators // rehearsal.sent)
    for key, size in message.messages.items():
        each.messages[key], each.calls[key] = size // rehearsal.sent, message.calls[key] // rehearsal.sent
    opening, turns = join_segments("prologue", prologue), rehearsal.turns
    return StageSample(
        layers, base, buffers, batch, sizes, sends_complete, opening, windows, reduction, each, turns, *story
    )


def _pipeline(layers: Collection[str]) -> tuple[list[str], list[int], Schedule]:
    """Kinds of the stages, their ranks, and one pass: forward through all of them, and back."""
    *own_kinds, last = layers
    kinds = [*own_kinds, "other", last]
    placement = [int(kind == "other") for kind in kinds]
    orders: Schedule = []
    for rank in (0, 1):
        own = [stage for stage, its in enumerate(placement) if its == rank]
        orders.append([*(Action(stage, "F", 0) for stage in own), *(Action(stage, "B", 0) for stage in reversed(own))])
    return kinds, placement, orders


def _small_run(experiment: Experiment, layers: Sequence[int], schedule: str, mode: str) -> Experiment:
    layout = ResolvedLayout.of(experiment)
    size = layout.micro_batch_size
    parallelism = replace(
        experiment.parallelism,
        pp=2,
        pp_schedule=schedule,
        pp_microbatches=None,
        pp_layers=tuple(layers),
        pp_layers_per_stage=None,
        pp_first_stage_less=0,
        pp_last_stage_less=0,
    )
    batch = layout.dp_degree * size * PASSES
    return replace(
        experiment,
        model=replace(experiment.model, layers=sum(layers)),
        parallelism=parallelism,
        training=replace(experiment.training, global_batch_size=batch, micro_batch_size=size),
        activation_checkpoint=replace(experiment.activation_checkpoint, mode=mode),
    )


def _sizes(tape: SegmentTracker, experiment: Experiment) -> list[CategoryBytes]:
    hidden = ActivationSpec.of(ResolvedLayout.of(experiment), DEVICE)
    whole = torch.Size(hidden.shape).numel() * hidden.dtype.itemsize
    size = {"received": whole, "made": whole, "objective": torch.float32.itemsize}
    grain = tape.granularity
    return [category_bytes({_CATEGORY[kind]: -(-size[kind] // grain) * grain}) for kind in KINDS]


def _is_delivered() -> bool:
    work = dist.isend(torch.empty(1), dst=1)
    return work is not None and work.is_completed()


def _window(pieces: Sequence[Segment], handed: CategoryBytes) -> ActionSegments:
    def of_block(piece: Segment) -> bool:
        return piece.label.partition(", ")[2].startswith("block")

    first = next((place for place, piece in enumerate(pieces) if of_block(piece)), len(pieces))
    end = next((place for place in range(first, len(pieces)) if not of_block(pieces[place])), len(pieces))
    return ActionSegments(list(pieces[:first]), list(pieces[first:end]), list(pieces[end:]), handed)


@contextmanager
def _marked_actions(tape: SegmentTracker, it: FakeRank) -> Iterator[None]:
    """Cut a tape at the beginning and the end of every action, and where gradients are reduced."""
    pipeline = it.state.built.pipeline
    assert pipeline is not None, "there are stages"

    def marked(call: Any, label: str) -> Any:
        def cut(*args: Any) -> Any:
            tape.cut(label)
            result = call(*args)
            tape.made.append(tape.birth(result) if result is not None else NOTHING)
            tape.cut(OVER)
            return result

        return cut

    for stage in pipeline.stages:
        for name in ("forward", "backward"):
            setattr(stage, name, marked(getattr(stage, name), f"{TURN} {stage.number}"))
    numbers = {id(stage.module): stage.number for stage in pipeline.stages}
    reduce, group = parallel_pipeline.reduce_gradients, FSDPParamGroup.post_backward
    final = FSDPState._root_post_backward_final_callback
    reducing = False

    def marked_reduction(module: Any) -> None:
        nonlocal reducing
        tape.cut(f"{REDUCE} {numbers[id(module)]}")
        reducing = True
        reduce(module)
        reducing = False

    def marked_group(*args: Any) -> None:
        if reducing:
            tape.cut(GROUP)
        group(*args)

    def marked_end(*args: Any) -> None:
        if reducing:
            tape.cut(FINAL)
        final(*args)

    with (
        patch.object(parallel_pipeline, "reduce_gradients", marked_reduction),
        patch.object(FSDPParamGroup, "post_backward", marked_group),
        patch.object(FSDPState, "_root_post_backward_final_callback", marked_end),
    ):
        yield
