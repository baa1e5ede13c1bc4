"""Matmul behind a `Linear` or `GroupedLinear`. Quantization recipes replace it."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.ops.autograd import recompute_input
from titan_exp.ops.moe.grouped_mm import grouped_linear, weighted_swiglu_linear
from titan_exp.ops.moe.permutation import PaddedOrder, permute
from titan_exp.ops.swiglu import weighted_swiglu
from titan_exp.ops.swiglu_variant import SwiGLUVariant


@runtime_checkable
class TensorParallelCollectives(Protocol):
    """Collectives around the linears of a block under tensor parallelism."""

    @property
    def degree(self) -> int:
        """Number of ranks."""
        ...

    @property
    def sequence(self) -> bool:
        """True if ranks hold parts of the tokens outside the linears."""
        ...

    @property
    def by_sequence(self) -> bool:
        """True if these are parts of each sequence, False if consecutive tokens of all."""
        ...

    def gather_input(self, x: Tensor) -> Tensor:
        """All tokens of this rank's."""
        ...

    def reduce_output(self, x: Tensor) -> Tensor:
        """This rank's tokens of the sum over ranks."""
        ...

    def gather_tokens(self, x: Tensor) -> Tensor:
        """All tokens [batch, seq, width] of the ranks', without a gradient."""
        ...

    def scatter_tokens(self, x: Tensor) -> Tensor:
        """This rank's tokens of the sum over ranks of [batch, seq, width], without a gradient."""
        ...


class LinearImpl(nn.Module):
    """Matmul in the dtype of input and weight. A recipe is a subclass."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weightᵀ: [..., inputs] and [outputs, inputs] to [..., outputs]."""
        return F.linear(x, weight)

    def column_parallel(self, x: Tensor, weight: Tensor, ranks: TensorParallelCollectives) -> Tensor:
        """Outputs of this rank's rows of the weight for all tokens; `x` are this rank's tokens."""
        return self(ranks.gather_input(x), weight)

    def row_parallel(self, x: Tensor, weight: Tensor, ranks: TensorParallelCollectives) -> Tensor:
        """Outputs of this rank's tokens; `x` are this rank's inputs of all tokens."""
        return ranks.reduce_output(self(x, weight))

    def shard(self, *, input_sharded: bool, amax_reduce: Callable[[Tensor], Tensor]) -> None:
        """Note that tensor-parallel ranks compute with shards of the weight, of inputs or outputs.

        `amax_reduce` is the elementwise maximum over these ranks.
        """


class GroupedLinearImpl(nn.Module):
    """Grouped matmul in the dtype of input and weight. A recipe is a subclass."""

    row_multiple = 1
    """Multiple of rows per expert that the kernel requires; rows that are not `padded` it pads itself."""

    def forward(self, x: Tensor, weight: Tensor, ends: Tensor, *, padded: bool = False) -> Tensor:
        """x · weight[expert]ᵀ: [tokens, inputs] and [experts, outputs, inputs] to [tokens, outputs].

        `padded` promises that every expert has a `row_multiple` of rows, and some; rows after the last end may then
        come out uninitialized.
        """
        return grouped_linear(x, weight, ends)

    def of_tokens(self, tokens: Tensor, weight: Tensor, order: PaddedOrder) -> Tensor:
        """The same for the padded rows of tokens."""
        return recompute_input(
            lambda tokens: permute(tokens, order.order, order.inverse, order.padding),
            tokens,
            lambda rows: self(rows, weight, order.ends, padded=True),
        )

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
