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
        """Note that tensor-parallel ranks compute with shards of the weight, of inputs or outputs.

        `amax_reduce` is the elementwise maximum over these ranks.
        """


class GroupedLinearImpl(nn.Module):
    """Grouped matmul in the dtype of input and weight. A recipe is a subclass."""

    def forward(self, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """x · weight[expert]ᵀ: [tokens, inputs] and [experts, outputs, inputs] to [tokens, outputs]."""
        return grouped_linear(x, weight, ends)
