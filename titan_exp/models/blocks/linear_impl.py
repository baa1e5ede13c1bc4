"""Matmul behind a `Linear` or `GroupedLinear`. Quantization recipes replace it."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.ops.moe.grouped_mm import grouped_linear
from titan_exp.ops.moe.weighted_swiglu import weighted_swiglu
from titan_exp.ops.moe.weighted_swiglu_linear import weighted_swiglu_linear
from titan_exp.ops.swiglu_variant import SwiGLUVariant


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

    def of_swiglu(
        self, gate_up: Tensor, weight: Tensor, ends: Tensor, row_weights: Tensor, variant: SwiGLUVariant
    ) -> Tensor:
        """The same for x = silu(gate) · up · row weight of `gate_up` [tokens, 2 · inputs], or a variant."""
        if type(self) is GroupedLinearImpl:
            return weighted_swiglu_linear(gate_up, weight, row_weights, ends, variant=variant)
        return self(weighted_swiglu(gate_up, row_weights, variant=variant), weight, ends)

    def shard(self, *, input_sharded: bool, amax_reduce: Callable[[Tensor], Tensor]) -> None:
        """Note that ranks with the same tokens compute with shards of the experts' channels, inputs or outputs.

        `amax_reduce` is the elementwise maximum over these ranks.
        """
