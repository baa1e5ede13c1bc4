"""How a projection multiplies its input by its weight: the one thing that a numeric recipe replaces."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class Product(nn.Module):
    """The product in the type that input and weight have. A recipe is a subclass."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ: [..., inputs] and [outputs, inputs] to [..., outputs]."""
        return F.linear(x, weight)

    def divide(self, *, inputs: bool, greatest: Callable[[Tensor], Tensor]) -> None:
        """Be told that every rank multiplies a part of the inputs, or else of the outputs, by its part of the weight.

        Args:
            inputs: whether it is inputs that are divided; the ranks' products are summed afterwards.
            greatest: the largest of the ranks' values, element by element.
        """
