"""A step without a pipeline, put together from that of a model of five layers and three micro-batches.

Layers between the first and the last are alike, and so are micro-batches: what is traced of one of them is repeated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from titan_exp.config.groups.experiment import Experiment
from titan_exp.config.layout.resolved_layout import ResolvedLayout
from titan_exp.plan.extrapolate.eligibility import LAYERS, MICRO_BATCHES
from titan_exp.plan.extrapolate.optimizer_step import TAIL, Tail, combined, marked_tail, trace_tail
from titan_exp.plan.extrapolate.segments import Amounts, Piece, Scene, Tape, amounts
from titan_exp.plan.trace.fake_world import pretended_rank
from titan_exp.plan.trace.trace_step import looked_at, trace_step
from titan_exp.trainer import forward_backward as trainer_model

MICRO_BATCH = "micro-batch"


@dataclass(frozen=True)
class Passes:
    """Forward and backward of one micro-batch."""

    before: list[Piece]
    """Up to the first block."""
    forward: list[Piece]
    """Of each block, in order of execution."""
    between: list[Piece]
    """Head and loss."""
    backward: list[Piece]
    """Of each block, in order of execution."""
    after: list[Piece]
    """From the first block on."""


@dataclass(frozen=True)
class WholeSample:
    """A step of the small model."""

    base: Amounts
    """What is held before it, less batches."""
    batch: Amounts
    """What a micro-batch holds."""
    looked_at: list[int]
    """The same, tensor by tensor."""
    prologue: list[Piece]
    """What comes before the first micro-batch."""
    micro_batches: list[Passes]
    """Each of them."""
    scenes: list[Scene]
    """Two steps, the first of one micro-batch, as an allocator is told them; none where nobody asked."""
    reduced: list[dict[str, int]]
    """Of each step: births of reduced gradients, by the names of their parameters."""


def sample_whole(experiment: Experiment, mode: str, *, cuda: bool, told: bool = False) -> WholeSample:
    """Trace a step of the same run with few layers and few micro-batches, every block recomputed by this mode.

    Args:
        experiment: the run, its layout resolved.
        mode: how every block is recomputed.
        cuda: as of `trace_step`.
        told: whether births and deaths are wanted too.
    """
    small = small_run(experiment, LAYERS, min(ResolvedLayout.of(experiment).gradient_accumulation, MICRO_BATCHES), mode)
    tape = Tape()
    with pretended_rank(small, 0) as it, marked_tail(tape), _marked_micro_batches(tape):
        trace_step(it.parts, it.step, first_step=it.shortest_step, batches=it.batches, cuda=cuda, tape=tape)
        pieces = tape.pieces()
        batches = [tape.amount(tensor) for tensor in looked_at(tape, it.batches)]
        batch = sum(batches[: len(batches) // len(it.batches)], amounts({}))
        tensors = [int(each.sum()) for each in batches[: len(batches) // len(it.batches)]]
        base, scenes = tape.base() - sum(batches, amounts({})), tape.scenes() if told else []
    prologue, rest = until(pieces, lambda piece: piece.label == MICRO_BATCH)
    rest, _ = until(rest, lambda piece: piece.label == TAIL)
    found = []
    while rest:
        first, rest = rest[0], rest[1:]
        one, rest = until(rest, lambda piece: piece.label == MICRO_BATCH)
        found.append(_passes([first, *one]))
    return WholeSample(base, batch, tensors, prologue, found, scenes, tape.reduced)


def small_run(experiment: Experiment, layers: int, micro_batches: int, mode: str) -> Experiment:
    """The same run, its layout resolved, of so many layers and micro-batches."""
    layout = ResolvedLayout.of(experiment)
    size = layout.micro_batch_size
    batch = layout.dp_degree * size * micro_batches
    return replace(
        experiment,
        model=replace(experiment.model, layers=layers),
        training=replace(experiment.training, global_batch_size=batch, micro_batch_size=size),
        activation_checkpoint=replace(experiment.activation_checkpoint, mode=mode),
    )


def whole_tails(experiment: Experiment, *, cuda: bool) -> tuple[Tail, Tail]:
    """The ends of a step with one and with two layers."""
    one, two = (trace_tail(small_run(experiment, layers, 1, "none"), 0, cuda=cuda) for layers in (1, 2))
    return one, two


def tail_of(tails: tuple[Tail, Tail], layers: int) -> Tail:
    """The end of a step with so many layers, from those with one and with two."""
    return combined([(2 - layers, tails[0]), (layers - 1, tails[1])])


def whole_pieces(samples: Sequence[WholeSample], modes: Sequence[int], micro_batches: int) -> list[Piece]:
    """The pieces of a step but its end.

    Args:
        samples: one for each way of recomputation.
        modes: of each block, which of these it has.
        micro_batches: of the step.
    """
    pieces = list(samples[0].prologue)
    few = len(samples[0].micro_batches)
    assert micro_batches >= few, "as many as there are, or more"
    order = [0, *[1] * (micro_batches - few + 1), *range(2, few)] if few > 1 else [0] * micro_batches
    for which in order:
        passes = [sample.micro_batches[which] for sample in samples]
        pieces += passes[0].before
        pieces += stretched([its.forward for its in passes], modes)
        pieces += passes[modes[-1]].between
        pieces += stretched([its.backward for its in passes], modes[::-1])
        pieces += passes[modes[0]].after
    return pieces


def stretched(traced: Sequence[Sequence[Piece]], modes: Sequence[int]) -> Iterator[Piece]:
    """A piece for each of `len(modes)` blocks, in order of execution, of which the middle one traced is repeated."""
    few, total = len(traced[0]), len(modes)
    for place, mode in enumerate(modes):
        at = min(place, few // 2) if total - place > few // 2 else few - (total - place)
        yield traced[mode][at]


def until(pieces: Sequence[Piece], ends: Callable[[Piece], bool]) -> tuple[list[Piece], list[Piece]]:
    """Pieces before the first that ends them, and the others."""
    place = next((place for place, piece in enumerate(pieces) if ends(piece)), len(pieces))
    return list(pieces[:place]), list(pieces[place:])


def _passes(pieces: Sequence[Piece]) -> Passes:
    before, rest = until(pieces, lambda piece: piece.label.startswith("forward, block"))
    forward, rest = until(rest, lambda piece: not piece.label.startswith("forward, block"))
    between, rest = until(rest, lambda piece: piece.label.startswith("backward, block"))
    backward, after = until(rest, lambda piece: not piece.label.startswith("backward, block"))
    return Passes(before, forward, between, backward, after)


@contextmanager
def _marked_micro_batches(tape: Tape) -> Iterator[None]:
    original = trainer_model.set_gradient_sync

    def marked(*args: Any, **kwargs: Any) -> None:
        tape.cut(MICRO_BATCH)
        original(*args, **kwargs)

    with patch.object(trainer_model, "set_gradient_sync", marked):
        yield
