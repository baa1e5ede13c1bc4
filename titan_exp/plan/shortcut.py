"""A rank's step from those of small ones: identical layers and micro-batches are traced once. What comes out is equal to
the trace of the whole; where that is not known, there is no shortcut."""

from collections.abc import Iterable
from dataclasses import dataclass

from titan_exp.config.experiment import Experiment
from titan_exp.config.layout import gradient_accumulation
from titan_exp.plan.memory import CATEGORIES, Moment
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


def peak_of(base: Amounts, pieces: Iterable[Piece]) -> Moment:
    """The moment at which most is held, the first of equal ones."""
    held, most, height, where = base, base, int(base.sum()), "before the step"
    for piece in pieces:
        total = int(held.sum() + piece.most.sum())
        if total > height:
            most, height, where = held + piece.most, total, piece.where
        held = held + piece.net
    return Moment(height, {name: int(size) for name, size in zip(CATEGORIES, most, strict=True)}, where)
