"""Float8 weights: cast once after each optimizer step, in both layouts, where a rank holds them whole or its
tensor-parallel shard.

All amax values are computed in one pass and reduced in one message, all weights cast by one kernel.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from titan_exp.ops.float8 import cast_weights, weights_amax
from titan_exp.ops.local_tensor import local_tensor
from titan_exp.quantization.float8.float8_linear import Float8
from titan_exp.quantization.float8.float8_tensor import E4M3, AmaxReduce, amax_of, cast
from titan_exp.quantization.recipes import Float8LinearImpl


def allocate_float8_weights(model: nn.Module) -> None:
    """Allocate the float8 weights of a materialized model that FSDP does not shard.

    Skips weights replicated by tensor-parallel ranks, which quantize the rows that they use.
    """
    for module, linear_impl in _float8_linears([model]):
        if getattr(module, "rows", None) is None:
            linear_impl.allocate_weight(local_tensor(module.get_parameter("weight")))


def modules_with_float8_weights(parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules whose float8 weight is allocated. Their matmuls read no other."""
    return [module for module, linear_impl in _float8_linears(parts) if linear_impl.quantized_weight is not None]


class Float8Weights:
    """Allocated float8 weights of this rank's modules, which compute in `dtype`."""

    def __init__(self, parts: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._linears = [found for found in _float8_linears(parts) if found[1].quantized_weight is not None]
        self._dtype = dtype

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantize the weights after they have changed; called by all ranks."""
        if not self._linears:
            return
        recipe = self._linears[0][1].recipe
        weights = [local_tensor(module.get_parameter("weight")).detach() for module, _ in self._linears]
        quantized = [linear_impl.quantized_weight for _, linear_impl in self._linears]
        rows = [weight.rows for weight in quantized if weight is not None]
        columns = [weight.columns for weight in quantized if weight is not None]
        fused = weights[0].is_cuda and not recipe.emulated
        amax = self._reduced(_amax(weights, recipe, fused=fused))
        scales = recipe.scale_of_amax(torch.cat([part.flatten() for part in amax]).to(self._dtype), E4M3)
        matrices = [matrix for pair in zip(rows, columns, strict=True) for matrix in pair]
        for new, kept in (
            (scales, [matrix.scale for matrix in matrices]),
            (scales.reciprocal(), [matrix.inverse for matrix in matrices]),
        ):
            parts = new.split([part.numel() for part in amax])
            torch._foreach_copy_(kept, [part.view_as(old) for part, old in zip(parts, kept, strict=True)])
        if fused:
            cast_weights(
                weights,
                [matrix.scale for matrix in rows],
                [matrix.scale for matrix in columns],
                [matrix.data for matrix in rows],
                [matrix.data.t() for matrix in columns],
                dtype=self._dtype,
            )
            return
        for weight, *both in zip(weights, rows, columns, strict=True):
            for matrix in both:
                matrix.data.copy_(cast(weight.to(self._dtype), matrix.scale, E4M3))

    def _reduced(self, amax: list[Tensor]) -> list[Tensor]:
        """Reduce the amax of scales that tensor-parallel ranks share, in one message."""
        reductions: list[AmaxReduce | None] = []
        for _, linear_impl in self._linears:
            over_inputs, over_outputs = linear_impl.recipe.input_amax_reduce, linear_impl.recipe.output_amax_reduce
            whole = over_inputs or over_outputs
            reductions.append(over_inputs if linear_impl.recipe.rowwise else whole)
            reductions.append(over_outputs if linear_impl.recipe.column_scales else whole)
        shared = [number for number, reduction in enumerate(reductions) if reduction is not None]
        if not shared:
            return amax
        reduction = reductions[shared[0]]
        assert reduction is not None
        message = reduction(torch.cat([amax[number].flatten() for number in shared]))
        parts = message.split([amax[number].numel() for number in shared])
        found = dict(zip(shared, parts, strict=True))
        return [found.get(number, part) for number, part in enumerate(amax)]


def _amax(weights: list[Tensor], recipe: Float8, *, fused: bool) -> list[Tensor]:
    """Amax of each weight for the scales of its rows and of its columns, in turn."""
    if not recipe.rowwise:
        return [amax for amax in torch._foreach_norm(weights, torch.inf) for _ in range(2)]
    both = weights_amax(weights) if fused else [(amax_of(weight, -1), amax_of(weight, 0)) for weight in weights]
    return [amax for rows, columns in both for amax in (rows, columns if recipe.column_scales else rows.amax())]


def _float8_linears(parts: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Float8LinearImpl]]:
    for part in parts:
        for module in part.modules():
            if isinstance(linear_impl := getattr(module, "linear_impl", None), Float8LinearImpl):
                yield module, linear_impl
