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


@contextmanager
def assume_expert_load(load: float) -> Iterator[None]:
    """Assume in the `with` block that this rank's experts receive `load` times the mean rows of a rank."""
    token = _LOAD.set(load)
    try:
        yield
    finally:
        _LOAD.reset(token)


def exchanged_rows(operator: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Result of a token exchange on fake tensors, whose counts are unknown; None for another call."""
    if str(operator._overloadpacket) not in EXCHANGES or type(args[0]) is not FakeTensor:
        return None
    rows, _, _, size, _ = args
    return rows.new_empty((round(rows.shape[0] * _LOAD.get()) if size is None else size, *rows.shape[1:]))
