"""Batch-size ramp: sequences per optimizer step by step, and their sum since the first step."""

from collections.abc import Sequence
from typing import Annotated

from annotated_types import Len

from titan_exp.config.groups.types import PositiveInt

RampStage = Annotated[tuple[PositiveInt, ...], Len(2, 2)]
"""Steps of a stage, and sequences in each of them."""


def batch_size_at(ramp: Sequence[Sequence[int]], last: int, step: int) -> int:
    """Sequences of a step, counted from 1; `last` are those after the ramp."""
    for steps, sequences in ramp:
        if step <= steps:
            return sequences
        step -= steps
    return last


def sequences_after(ramp: Sequence[Sequence[int]], last: int, steps: int) -> int:
    """Sequences of the first `steps` steps together."""
    total = 0
    for length, sequences in ramp:
        total += min(length, steps) * sequences
        steps -= min(length, steps)
    return total + steps * last


def steps_for(ramp: Sequence[Sequence[int]], last: int, sequences: int) -> int:
    """Smallest number of steps with that many sequences together."""
    done = 0
    for length, size in ramp:
        if sequences <= length * size:
            return done - (-sequences // size)
        done, sequences = done + length, sequences - length * size
    return done - (-sequences // last)
