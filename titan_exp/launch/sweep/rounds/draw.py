"""Random and Sobol points of a search space."""

from collections.abc import Iterator, Sequence

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.study.search import Range, Search
from titan_exp.config.study.study import Choice

REPEATS = 200
"""Draws per wanted point; more would mean that the ranges have hardly any other point."""


def drawn_choices(search: Search) -> tuple[Choice, ...]:
    """Points of a `random` or `sobol` search, each once. The first points do not depend on the number of points.

    Raises:
        UserError: the ranges have fewer different points.
    """
    found: dict[Choice, None] = {}
    for row in _rows(search):
        found.setdefault(choice_at(search.ranges, [one.value(u) for one, u in zip(search.ranges, row, strict=True)]))
        if len(found) == search.points:
            return tuple(found)
    raise UserError(
        f"search.points={search.points}: these ranges gave only {len(found)} different points. Ask for fewer, or "
        "widen the ranges."
    )


def choice_at(ranges: Sequence[Range], values: Sequence[str]) -> Choice:
    """Choice that sets each range's key to a value."""
    overrides = tuple(f"{one.key}={value}" for one, value in zip(ranges, values, strict=True))
    return Choice(overrides, " ".join(overrides))


def _rows(search: Search) -> Iterator[list[float]]:
    """Points of the unit cube: independent, or a Sobol sequence that is shifted modulo 1 by one random vector (Cranley
    and Patterson 1976), which every version of scipy computes alike."""
    import numpy as np

    generator, dimensions = np.random.default_rng(search.seed), len(search.ranges)
    if search.method == "random":
        for _ in range(search.points * REPEATS):
            yield generator.random(dimensions).tolist()
        return
    from scipy.stats import qmc

    shift, sequence = generator.random(dimensions), qmc.Sobol(dimensions, scramble=False)
    for _ in range(search.points * REPEATS):
        yield ((sequence.random(1)[0] + shift) % 1.0).tolist()
