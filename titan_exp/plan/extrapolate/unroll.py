"""Unrolled sequences: those of three small models, each a period of layers larger, determine one of any depth.

A sequence has runs of periods, to each of which a larger model adds one at the end. Numbers in it, such as the number
of an allocation or its size, are linear in the period and in the number of periods.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from titan_exp.plan.extrapolate.schedule import ExtrapolationError


class Token(NamedTuple):
    """Element of a sequence."""

    kind: tuple[Any, ...]
    """What does not depend on the depth."""
    numbers: tuple[int, ...] = ()
    """Numbers that depend on it."""


def unroll(sequences: Sequence[Sequence[Token]], periods: int) -> list[Token]:
    """Sequence with `periods` more than the first of three, of which the second has one more and the third two.

    Raises:
        ExtrapolationError: a number is not linear, or more is added than a period.
    """
    first, second, third = sequences
    if len(third) - len(second) != len(second) - len(first):
        raise ExtrapolationError("a sequence of the optimizer step grows by another period each time")
    found, one, two = list[Token](), 0, 0
    for place, length in enumerate(_added(first, second, third)):
        triples = list(zip(second[one : one + length], third[two : two + length], third[two + length :], strict=False))
        found += [_in_period(*triple, number, periods) for number in range(periods) for triple in triples]
        one, two = one + length, two + 2 * length
        if place < len(first):
            found.append(_outside(first[place], second[one], periods))
            one, two = one + 1, two + 1
    return found


def _in_period(alone: Token, early: Token, late: Token, period: int, periods: int) -> Token:
    """Token of an added period, from that of the only one, and those of two."""
    triples = zip(alone.numbers, early.numbers, late.numbers, strict=True)
    return Token(alone.kind, tuple(x + (y - x) * (periods - 1) + (z - y) * period for x, y, z in triples))


def _outside(none: Token, one: Token, periods: int) -> Token:
    """Token outside of added periods, from those of sequences with none and one."""
    return Token(none.kind, tuple(x + (y - x) * periods for x, y in zip(none.numbers, one.numbers, strict=True)))


def _added(first: Sequence[Token], second: Sequence[Token], third: Sequence[Token]) -> list[int]:
    """Number of tokens that the second sequence adds before each of the first, and at the end, and the third twice: at
    as few places as possible, with periods that continue those before them, and other numbers linear."""
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
    """True if an added period differs from the tokens before it as the two of the third sequence do from each other."""
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
