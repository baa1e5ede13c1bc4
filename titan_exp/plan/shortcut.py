"""A rank's step from those of small runs: identical layers and micro-batches are traced once.

What comes out equals the trace of the whole. Where that is not known to be so, there is no shortcut, and `why_not` says
why.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from titan_exp.config.builtins import ARCHITECTURES
from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import gradient_accumulation, pipeline_microbatches, reshard_policy
from titan_exp.config.pipeline import layer_counts, pipeline_splits_backward, stage_layers, stage_placement
from titan_exp.parallel.orders import training_orders
from titan_exp.plan.memory import CATEGORIES, Moment
from titan_exp.plan.rehearsal import Rehearsal, rehearse
from titan_exp.plan.stage_sample import FIRST, LAST, MIDDLE, StageSample, sample_stages
from titan_exp.plan.staged_model import (
    StageShape,
    StageTails,
    action_piece,
    base_of,
    played,
    reduction_pieces,
    trace_stage_tails,
)
from titan_exp.plan.tails import Tail
from titan_exp.plan.tape import Amounts, Piece, added
from titan_exp.plan.watch import Work
from titan_exp.plan.whole_model import LAYERS, WholeSample, sample_whole, tail_of, whole_pieces, whole_tails


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


@dataclass(frozen=True)
class Parts:
    """What steps are put together from that differ in layers, schedule and number of micro-batches alone."""

    whole: Sequence[WholeSample]
    """Without a pipeline: a sample for each way of recomputation."""
    whole_tails: tuple[Tail, Tail] | None
    """Likewise; None where births and deaths are told, whose ends are those of a rank with all layers."""
    stages: Mapping[bool, Sequence[StageSample]]
    """With one: samples likewise, for stages of several blocks and for those of one."""
    stage_tails: StageTails | None
    """Likewise."""


def why_not(experiment: Experiment) -> str | None:
    """Why layers or micro-batches of a run, its layout resolved, are not known to be alike; None where they are."""
    parallelism, fp32 = experiment.parallelism, experiment.training.fp32_modules
    reasons = {
        "only of the built-in model it is known that its layers are alike": experiment.model.architecture
        not in ARCHITECTURES,
        "quantization tells layers apart": experiment.quantization.recipe != "none",
        "what is compiled is shared by layers": experiment.compile.enabled,
        "training.fp32_modules may name single layers": any(
            not pattern.startswith("blocks.*") and ("*" in pattern or "?" in pattern or "blocks" in pattern)
            for pattern in fp32
        ),
        "an optimizer of one's own may tell layers apart": experiment.optimizer.name != "adamw",
        "parallelism.prefetch_blocks reaches over several layers": parallelism.prefetch_blocks > 1,
        "parallelism.cpu_offload": parallelism.cpu_offload,
    }
    if parallelism.pp > 1:
        reasons |= {
            f"{parallelism.pp_schedule} computes the gradients of weights later, whose layers cannot be told apart": (
                pipeline_splits_backward(parallelism)
            ),
            "the first and the last stage share a weight": experiment.model.tied_embeddings,
            "parameters are gathered anew for each micro-batch": reshard_policy(parallelism) != "never",
            "there are several passes through the pipeline": (
                pipeline_microbatches(experiment) != gradient_accumulation(experiment)
            ),
            "a stage has no layers": min(layer_counts(experiment)) < 1,
            "every stage looks at documents": experiment.data.document_mask,
        }
    return next((reason for reason, holds in reasons.items() if holds), None)


def trace_parts(experiment: Experiment, *, cuda: bool, told: bool = False) -> Parts:
    """Trace what the steps of a run, its layout resolved, are put together from.

    Args:
        experiment: the run.
        cuda: as of `trace_step`.
        told: whether births and deaths of storages are wanted too.
    """
    modes, _ = recomputation(experiment)
    if experiment.parallelism.pp == 1:
        whole = [sample_whole(experiment, mode, cuda=cuda, told=told) for mode in modes]
        return Parts(whole, None if told else whole_tails(experiment, cuda=cuda), {}, None)
    lone = {count == 1 for count in layer_counts(experiment)}
    stages = {
        alone: [sample_stages(experiment, mode, lone=alone, cuda=cuda, told=told) for mode in modes] for alone in lone
    }
    return Parts((), None, stages, None if told else trace_stage_tails(experiment, cuda=cuda))


def extended(experiment: Experiment, pipeline_rank: int, parts: Parts, rehearsal: Rehearsal | None = None) -> Extended:
    """What a step of a rank takes.

    Args:
        experiment: the run, its layout resolved.
        pipeline_rank: its number along pp.
        parts: traced for this layout.
        rehearsal: of this rank's schedule, where it is known.
    """
    pieces = passes_of(experiment, pipeline_rank, parts, rehearsal)
    if parts.stage_tails is None:
        assert parts.whole_tails is not None, "one of them is there"
        tail = tail_of(parts.whole_tails, experiment.model.layers)
        base = parts.whole[0].base - tail_of(parts.whole_tails, LAYERS).kept + tail.kept
        return _put_together(base, pieces, tail)
    stages = stages_of(experiment, pipeline_rank)
    sample = parts.stages[len(stages[0].modes) == 1][0]
    base = base_of(
        sample, parts.stage_tails, stages, pipeline_microbatches(experiment), shared=experiment.parallelism.cp > 1
    )
    return _put_together(base, pieces, parts.stage_tails.of(stages))


def passes_of(
    experiment: Experiment, pipeline_rank: int, parts: Parts, rehearsal: Rehearsal | None = None
) -> Sequence[Piece]:
    """The pieces of a rank's step but its end; the arguments are those of `extended`."""
    if experiment.parallelism.pp == 1:
        _, of_block = recomputation(experiment)
        return whole_pieces(parts.whole, of_block, gradient_accumulation(experiment))
    rehearsal = rehearsal or rehearsed(experiment, pipeline_rank, parts)
    stages = stages_of(experiment, pipeline_rank)
    by_number = {stage.number: stage for stage in stages}
    of_stage = {stage.number: parts.stages[len(stage.modes) == 1] for stage in stages}
    keys = {(turn.action.stage, turn.action.kind, turn.first) for turn in rehearsal.turns}
    actions = {(at, kind, first): action_piece(of_stage[at], by_number[at], kind, first) for at, kind, first in keys}
    sample = of_stage[stages[0].number][0]
    reduction = [piece for stage in stages for piece in reduction_pieces(of_stage[stage.number][0], stage)]
    return [sample.prologue, played(sample, rehearsal, actions), *reduction]


def rehearsed(experiment: Experiment, pipeline_rank: int, parts: Parts) -> Rehearsal:
    """A rank's schedule, gone through."""
    parallelism, placement = experiment.parallelism, stage_placement(experiment)
    sample = next(iter(parts.stages.values()))[0]
    orders = training_orders(parallelism.pp_schedule, parallelism.pp, len(placement), pipeline_microbatches(experiment))
    return rehearse(orders, placement, pipeline_rank, passes=1, delivered=sample.delivered)


def stages_of(experiment: Experiment, pipeline_rank: int) -> list[StageShape]:
    """The stages of a pipeline rank."""
    layers, placement = stage_layers(experiment), stage_placement(experiment)
    _, of_block = recomputation(experiment)
    kinds = [FIRST, *[MIDDLE] * (len(layers) - 2), LAST]
    return [
        StageShape(number, kinds[number], tuple(of_block[layer] for layer in layers[number]))
        for number, rank in enumerate(placement)
        if rank == pipeline_rank
    ]


def recomputation(experiment: Experiment) -> tuple[list[str], list[int]]:
    """The ways in which blocks are recomputed, and which of them each block has."""
    checkpointing, layers = experiment.activation_checkpoint, experiment.model.layers
    if checkpointing.mode != "every_n":
        return [checkpointing.mode], [0] * layers
    return ["none", "full"], [int((number + 1) % checkpointing.every == 0) for number in range(layers)]


def _put_together(base: Amounts, pieces: Sequence[Piece], tail: Tail) -> Extended:
    peak, held = _peak(base, pieces)
    assert held.sum() + tail.piece.most.sum() < peak.bytes, "what the optimizer takes for a moment is little"
    return Extended(
        peak,
        _by_category(tail.kept),
        _by_category(held)["gradients"],
        added([*(piece.work for piece in pieces), tail.piece.work]),
    )


def _peak(base: Amounts, pieces: Iterable[Piece]) -> tuple[Moment, Amounts]:
    """The moment at which most is held, the first of equal ones; and what is held at the end."""
    held, most, height, where = base, base, int(base.sum()), "before the step"
    for piece in pieces:
        total = int(held.sum() + piece.most.sum())
        if total > height:
            most, height, where = held + piece.most, total, piece.where
        held = held + piece.net
    return Moment(height, _by_category(most), where), held


def _by_category(held: Amounts) -> dict[str, int]:
    return {name: int(size) for name, size in zip(CATEGORIES, held, strict=True)}
