"""Optimizers that compute gradients at other weights than those that a run evaluates, saves and exports."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class HasGradientPoint(Protocol):
    """An optimizer whose `step` starts at the gradient's point and ends at the averaged weights."""

    after_move: Callable[[], object]
    """Recomputes what is kept of the weights elsewhere."""

    def to_gradient_point(self) -> None:
        """Move the parameters from the averaged weights to where the next gradients are computed."""
        ...
