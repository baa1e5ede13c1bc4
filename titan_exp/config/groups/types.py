"""Number types with bounds, shared by the groups' dataclasses."""

from typing import Annotated

from annotated_types import Ge, Gt, Interval

PositiveInt = Annotated[int, Ge(1)]
"""A whole number of at least 1."""
Count = Annotated[int, Ge(0)]
"""A whole number of at least 0."""
PositiveFloat = Annotated[float, Gt(0)]
"""A number above 0."""

NonNegativeFloat = Annotated[float, Ge(0)]
"""A number of at least 0."""

Share = Annotated[float, Interval(ge=0, lt=1)]
"""A fraction from 0 up to, but without, 1."""

Ratio = Annotated[float, Interval(ge=0, le=1)]
"""A fraction from 0 to 1."""

BLOCKS = 10_000
"""Largest number of blocks: each is described and built."""

BlockCount = Annotated[int, Interval(ge=0, le=BLOCKS)]
"""A number of blocks, which may be none."""

PositiveBlockCount = Annotated[int, Interval(ge=1, le=BLOCKS)]
"""A number of blocks, at least one."""
