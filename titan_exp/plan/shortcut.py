"""A rank's step from those of small ones: identical layers and micro-batches are traced once. What comes out is equal to
the trace of the whole; where that is not known, there is no shortcut."""

from collections.abc import Iterable
from dataclasses import dataclass

from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import gradient_accumulation, pipeline_microbatches
from titan_exp.config.pipeline import pipeline_splits_backward, stage_layers, stage_placement
from titan_exp.parallel.orders import training_orders
from titan_exp.plan.memory import CATEGORIES, Moment
from titan_exp.plan.rehearsal import rehearse
from titan_exp.plan.stage_sample import FIRST, LAST, MIDDLE, sample_stages
from titan_exp.plan.staged_model import (
    StageShape,
    action_piece,
    base_of,
    played,
    reduction_pieces,
    trace_stage_tails,
)
from titan_exp.plan.tape import Amounts, Piece, added
from titan_exp.plan.watch import Work
from titan_exp.plan.whole_model import LAYERS, sample_whole, tail_of, whole_pieces, whole_tails


@dataclass(frozen=True)
class Extended:
    """What a step takes, as its trace would tell."""

    peak: Moment
    """When most memory is held."""
    kept: dict[str, int]
    """Parameters and the optimizer's state, bytes held between steps."""
    gradients: int
    """Bytes of this rank's reduced gradients, as the optimizer takes them."""
    work: Work
    """Operations, bytes and messages of the step."""


def modes_of(experiment: Experiment) -> tuple[list[str], list[int]]:
    """The ways in which blocks are recomputed, and which of them each block has."""
    checkpointing, layers = experiment.activation_checkpoint, experiment.model.layers
    if checkpointing.mode != "every_n":
        return [checkpointing.mode], [0] * layers
    return ["none", "full"], [int((number + 1) % checkpointing.every == 0) for number in range(layers)]


def extended_whole(experiment: Experiment, *, cuda: bool) -> Extended:
    """The step of a rank without a pipeline."""
    modes, of_block = modes_of(experiment)
    samples = [sample_whole(experiment, mode, cuda=cuda) for mode in modes]
    tails = whole_tails(experiment, cuda=cuda)
    tail = tail_of(tails, experiment.model.layers)
    base = samples[0].base - tail_of(tails, LAYERS).kept + tail.kept
    pieces = whole_pieces(samples, of_block, gradient_accumulation(experiment))
    peak = peak_of(base, [*pieces, tail.piece])
    work = added([*(piece.work for piece in pieces), tail.piece.work])
    kept = {name: int(size) for name, size in zip(CATEGORIES, tail.kept, strict=True)}
    gradients = base + sum(piece.net for piece in pieces)
    return Extended(peak, kept, int(gradients[CATEGORIES.index("gradients")]), work)


def extended_rank(experiment: Experiment, pipeline_rank: int, *, cuda: bool) -> Extended:
    """The step of a rank of a pipeline."""
    modes, of_block = modes_of(experiment)
    split = pipeline_splits_backward(experiment.parallelism)
    wanted = {len(layers) == 1 for layers in stage_layers(experiment)}
    by_lone = {
        lone: [sample_stages(experiment, mode, split=split, lone=lone, cuda=cuda) for mode in modes] for lone in wanted
    }
    samples = next(iter(by_lone.values()))
    tails = trace_stage_tails(experiment, cuda=cuda)
    placement, layers = stage_placement(experiment), stage_layers(experiment)
    microbatches, name = pipeline_microbatches(experiment), experiment.parallelism.pp_schedule
    orders = training_orders(name, experiment.parallelism.pp, len(layers), microbatches)
    rehearsal = rehearse(orders, placement, pipeline_rank, passes=1, delivered=samples[0].delivered)
    last = len(layers) - 1
    stages = [
        StageShape(
            number,
            FIRST if number == 0 else LAST if number == last else MIDDLE,
            tuple(of_block[layer] for layer in layers[number]),
        )
        for number, rank in enumerate(placement)
        if rank == pipeline_rank
    ]
    by_number = {stage.number: stage for stage in stages}
    keys = {(turn.action.stage, turn.action.kind, turn.first) for turn in rehearsal.turns}
    actions = {key: action_piece(by_lone[len(by_number[key[0]].modes) == 1], by_number[key[0]], key[1], key[2]) for key in keys}
    passes, _ = played(samples[0], rehearsal, actions)
    reduction = [piece for stage in stages for piece in reduction_pieces(by_lone[len(stage.modes) == 1][0], stage)]
    tail = tails.of(stages)
    base = base_of(
        samples[0], tails, stages, microbatches, shared=experiment.parallelism.cp > 1
    )
    pieces = [samples[0].prologue, passes, *reduction]
    peak = peak_of(base, [*pieces, tail.piece])
    work = added([*(piece.work for piece in pieces), tail.piece.work])
    kept = {name: int(size) for name, size in zip(CATEGORIES, tail.kept, strict=True)}
    gradients = base + sum(piece.net for piece in pieces)
    return Extended(peak, kept, int(gradients[CATEGORIES.index("gradients")]), work)


def peak_of(base: Amounts, pieces: Iterable[Piece]) -> Moment:
    """The moment at which most is held, the first of equal ones."""
    held, most, height, where = base, base, int(base.sum()), "before the step"
    for piece in pieces:
        total = int(held.sum() + piece.most.sum())
        if total > height:
            most, height, where = held + piece.most, total, piece.where
        held = held + piece.net
    return Moment(height, {name: int(size) for name, size in zip(CATEGORIES, most, strict=True)}, where)
