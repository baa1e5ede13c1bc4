"""Matmul behind a `Linear` or `GroupedLinear`. Quantization recipes replace it."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.ops.moe.grouped_mm import grouped_linear


class LinearImpl(nn.Module):
    """Matmul in the dtype of input and weight. A recipe is a subclass."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ: [..., inputs] and [outputs, inputs] to [..., outputs]."""
        return F.linear(x, weight)

    def shard(self, *, input_sharded: bool, amax_reduce: Callable[[Tensor], Tensor]) -> None:
        """Note that each tensor-parallel rank computes with its shard of the weight.

        Args:
            inputs: whether it is inputs that are divided; the ranks' products are summed afterwards.
            amax_reduce: the largest of the ranks' values, element by element.
        """


class GroupedLinearImpl(nn.Module):
    """Grouped matmul in the dtype of input and weight. A recipe is a subclass."""

    def forward(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """x · weight[expert]ᵀ: [tokens, inputs] and [experts, outputs, inputs] to [tokens, outputs] (see
        `ops.grouped_linear`)."""
        return grouped_linear(x, weight, ends)
