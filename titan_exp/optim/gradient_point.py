"""Optimizers that compute gradients at other weights than those that a run evaluates, saves and exports."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class HasGradientPoint(Protocol):
    """An optimizer whose `step` starts at the gradient's point and ends at the averaged weights."""

    def to_gradient_point(self) -> None:
        """Move the parameters from the averaged weights to where the next gradients are computed; the caller then
        refreshes what is kept of the weights elsewhere."""
        ...
