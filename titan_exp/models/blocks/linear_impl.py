"""How a projection, or one of each expert, multiplies its input by its weight: what a numeric recipe replaces."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.ops.moe.grouped_mm import grouped_linear


class LinearImpl(nn.Module):
    """The product in the type that input and weight have. A recipe is a subclass."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ: [..., inputs] and [outputs, inputs] to [..., outputs]."""
        return F.linear(x, weight)

    def shard(self, *, input_sharded: bool, amax_reduce: Callable[[Tensor], Tensor]) -> None:
        """Be told that every rank multiplies a part of the inputs, or else of the outputs, by its part of the weight.

        Args:
            inputs: whether it is inputs that are divided; the ranks' products are summed afterwards.
            greatest: the largest of the ranks' values, element by element.
        """


class GroupedLinearImpl(nn.Module):
    """The product of experts in the type that input and weight have. A recipe is a subclass."""

    def forward(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """x · weight[expert]ᵀ: [tokens, inputs] and [experts, outputs, inputs] to [tokens, outputs] (see
        `ops.grouped_linear`)."""
        return grouped_linear(x, weight, ends)
