"""Rows that a rank receives for its experts. They depend on the data, so the planner assumes a load.

Uniform routing sends every rank of an expert-parallel group as many rows as it sends itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_LOAD: ContextVar[float] = ContextVar("expert load", default=1.0)
"""Received rows divided by sent ones."""
EXCHANGES = ("titan_exp.all_to_all_rows", "titan_exp.return_rows")
"""Operators that exchange tokens between the ranks of an expert-parallel group."""
SYMMETRIC_EXCHANGES = ("titan_exp.symmetric_dispatch", "titan_exp.symmetric_return")
"""The same through symmetric memory, whose results have room for more rows than come."""


@contextmanager
def assume_expert_load(load: float) -> Iterator[None]:
    """Assume in the `with` block that this rank's experts receive `load` times the mean rows of a rank."""
    token = _LOAD.set(load)
    try:
        yield
    finally:
        _LOAD.reset(token)


def exchanged_rows(operator: Any, args: tuple[Any, ...]) -> Any:
    """Result of a token exchange on fake tensors, whose counts are unknown; None for another call."""
    name = str(operator._overloadpacket)
    if name not in EXCHANGES + SYMMETRIC_EXCHANGES or type(args[0]) is not FakeTensor:
        return None
    if name in SYMMETRIC_EXCHANGES:
        return operator(*args)  # not its body, which needs symmetric memory
    rows, _, _, size, _ = args
    return rows.new_empty((_received(rows) if size is None else size, *rows.shape[1:]))


def filled_share(operator: Any, args: tuple[Any, ...]) -> float | None:
    """Share of the room for received rows that is filled; None for a call that makes no such room."""
    if str(operator._overloadpacket) != SYMMETRIC_EXCHANGES[0]:
        return None
    rows, _, room, _ = args
    return min(1.0, _received(rows) / room)


def _received(rows: Tensor) -> int:
    return round(rows.shape[0] * _LOAD.get())
