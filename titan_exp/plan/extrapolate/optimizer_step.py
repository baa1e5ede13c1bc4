"""The end of a step, from reduced gradients to the next one: clipping, the optimizer, what is freed.

It knows layers by their number alone, so it is traced for one, two and three of them, without any forward or backward
pass: its gradients are made of nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from titan_exp.config.groups.experiment import Experiment
from titan_exp.plan.extrapolate.allocation_events import TailStory, Unwoven
from titan_exp.plan.extrapolate.segments import Amounts, Piece, Scene, Tape, added, amounts, joined
from titan_exp.plan.trace.fake_world import PretendedRank, pretended_rank
from titan_exp.plan.trace.trace_step import trace_step
from titan_exp.trainer import train_step as trainer_step

TAIL = "the end of the step"


@dataclass(frozen=True)
class Tail:
    """The end of a step of one rank."""

    piece: Piece
    """All of it."""
    kept: Amounts
    """Parameters and the optimizer's state."""
    gradients: int
    """Bytes of reduced gradients, which the first part of the step has left and this one frees."""


def trace_tail(experiment: Experiment, rank: int, *, cuda: bool) -> Tail:
    """Trace the end of a rank's step.

    Args:
        experiment: the run, its layout resolved.
        rank: of all processes.
        cuda: as of `trace_step`.
    """
    tape = Tape()
    with pretended_rank(experiment, rank) as it, marked_tail(tape):
        trace = trace_step(it.parts, lambda: _end(it), cuda=cuda, tape=tape)
    pieces = tape.pieces()
    first = next(place for place, piece in enumerate(pieces) if piece.label == TAIL)
    kept = {name: trace.kept[name] for name in ("parameters", "optimizer")}
    return Tail(joined(TAIL, pieces[first:]), amounts(kept), trace.gradients)


@contextmanager
def marked_tail(tape: Tape) -> Iterator[None]:
    """Cut a tape where a step's passes are over."""
    original = trainer_step.reduce_partial_gradients

    def marked(*args: Any) -> None:
        tape.reduced.append(births_of_gradients(tape, args[0]))
        tape.cut(TAIL)
        original(*args)

    with patch.object(trainer_step, "reduce_partial_gradients", marked):
        yield


def births_of_gradients(tape: Tape, parts: Iterable[nn.Module]) -> dict[str, int]:
    """Births of the storages of gradients, by the names of their parameters."""
    named = [pair for part in parts for pair in part.named_parameters()]
    return {name: tape.birth(weight.grad) for name, weight in named if weight.grad is not None}


def trace_tail_story(experiment: Experiment, rank: int, layers: Sequence[int], *, cuda: bool) -> TailStory:
    """Trace the build of a rank and the ends of two steps of it.

    Args:
        experiment: the run, its layout resolved.
        rank: of all processes.
        layers: numbers of its layers in the whole model.
        cuda: as of `trace_step`.

    Raises:
        Unwoven: more than gradients and a loss go into the end of a step.
    """
    tape = Tape()
    with pretended_rank(experiment, rank) as it, marked_tail(tape):
        trace_step(it.parts, lambda: _end(it), standing=it.standing, cuda=cuda, tape=tape)
        scenes, pieces, built = tape.scenes(), tape.pieces(), it.parts.built
    ends, losses = list[list[Scene]](), list[int]()
    for step, gradients in enumerate(tape.reduced):
        own = [scene for scene in scenes if scene.step == step]
        first = next(place for place, scene in enumerate(own) if scene.label == TAIL)
        made = {it.birth for scene in own[:first] for it in scene.told if it.size} - set(gradients.values())
        if len(made) != 1:
            raise Unwoven("more than gradients and a loss go into the end of a step")
        losses += made
        ends.append(own[first:])
    names = [{birth: name for name, birth in gradients.items()} for gradients in tape.reduced]
    build = [scene for scene in scenes if scene.step < 0]
    work = added([piece.work for piece in pieces[[piece.label for piece in pieces].index(TAIL) :]])
    return TailStory(build, ends, names, losses, layers, work, built.parameters, built.flops_per_token)


def combined(terms: list[tuple[int, Tail]]) -> Tail:
    """A sum of tails, each so many times, where negative numbers take away."""
    net = sum((times * tail.piece.net for times, tail in terms), amounts({}))
    most = sum((times * tail.piece.most for times, tail in terms), amounts({}))
    kept = sum((times * tail.kept for times, tail in terms), amounts({}))
    work = added([added([tail.piece.work], times) for times, tail in terms])
    last = terms[-1][1].piece
    return Tail(Piece(TAIL, net, most, last.where, work), kept, sum(times * tail.gradients for times, tail in terms))


def _end(it: PretendedRank) -> None:
    parts = it.parts

    def no_passes(*_: Any) -> torch.Tensor:
        for weight in parts.model.parameters():
            weight.grad = torch.empty_like(weight)
        return torch.zeros(())

    model: Any = SimpleNamespace(
        parts=parts.model.parts,
        parameters=parts.model.parameters,
        counted=parts.model.unique_parameters,
        forward_backward=no_passes,
    )
    trainer_step.train_step(
        model,
        parts.optimizer,
        [],
        tokens=1,
        lr=it.experiment.optimizer.lr,
        max_grad_norm=it.experiment.training.max_grad_norm,
        mesh=parts.mesh,
    )
