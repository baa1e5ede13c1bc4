"""Native NVFP4 linear on Blackwell: `nvfp4_linear` by torchao's kernels and torch's scaled matmul.

Requires bf16, and dims and tokens in multiples of 128. With power-of-two scales results equal the emulation bit for
bit; otherwise torchao divides in another order, and the last bit of a scale may differ.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_exp.config.torch_features import import_torchao
from titan_exp.ops.autograd import needs_input_grad
from titan_exp.quantization.float8 import AmaxReduce, unflatten
from titan_exp.quantization.nvfp4 import E4M3, LARGEST, NVFP4, SIGNS

with import_torchao():
    from torchao.prototype.moe_training.nvfp4_training.hadamard_amax_triton import triton_rht_amax
    from torchao.prototype.moe_training.nvfp4_training.hadamard_quantize_row_col_triton import (
        triton_rht_quantize_row_col,
    )
    from torchao.prototype.moe_training.nvfp4_training.quantize_2d_triton import triton_weight_quantize_2d

Operand = tuple[Tensor, Tensor, Tensor]  # packed e2m1 [rows, columns / 2], swizzled block scales, and the tensor scale


def nvfp4_native(x: Tensor, weight: Tensor, scale: Tensor | None, recipe: NVFP4) -> Tensor:
    """Compute x · weightᵀ, as in `nvfp4_linear`."""
    return _NVFP4Native.apply(x, weight, scale, recipe)  # type: ignore[return-value]  # a Tensor


class _NVFP4Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor | None, recipe: NVFP4) -> Tensor:
        ctx.recipe = recipe
        scale = recipe.scale_of_weight(weight) if scale is None else scale
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        by_row, by_token = _tokens(rows, recipe, recipe.input_amax_reduce)
        # We keep the input in four bits, and round the weight again in backward, where FSDP gathers it again.
        ctx.save_for_backward(weight, scale, *by_token)
        return unflatten(_multiply(by_row, _weight(weight, scale)[0]), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        recipe: NVFP4 = ctx.recipe
        weight, scale, *x_by_token = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1]).contiguous()
        x_grad = weight_grad = None
        needs_x_grad, needs_weight_grad = needs_input_grad(ctx)
        by_row, by_token = _tokens(gradient, recipe, recipe.output_amax_reduce, stochastic=recipe.stochastic)
        if needs_x_grad:
            x_grad = unflatten(_multiply(by_row, _weight(weight, scale)[1]), gradients[0])
        if needs_weight_grad:
            weight_grad = _multiply(by_token, (x_by_token[0], x_by_token[1], x_by_token[2]))
        return x_grad, weight_grad, None, None


def _tokens(
    rows: Tensor, recipe: NVFP4, amax_reduce: AmaxReduce | None, *, stochastic: bool = False
) -> tuple[Operand, Operand]:
    """Quantize [tokens, columns] in blocks along columns, and its transformed transpose in blocks along tokens."""
    signs = list(SIGNS)
    amax = torch.stack(triton_rht_amax(rows, signs))
    by_token, by_row = recipe.scale_of_amax(amax, amax_reduce).unbind()
    keys: list[Tensor | None] = [None] * 4
    if stochastic:
        # Seeds and offsets of the kernel's RNG, drawn from the device's generator, which every step seeds.
        keys = list(torch.randint(0, 2**32, (4, 1), dtype=torch.int64, device=rows.device).unbind())
    names = ("col_seed_base", "row_seed_base", "col_offset_base", "row_offset_base")
    options: dict[str, Any] = {"stochastic_rounding": stochastic, **dict(zip(names, keys, strict=True))}
    reaches = _reach(by_token), _reach(by_row)
    columns, column_scales, codes, scales = triton_rht_quantize_row_col(rows, *reaches, signs, **options)
    return (codes, scales, by_row), (columns, column_scales, by_token)


def _weight(weight: Tensor, scale: Tensor) -> tuple[Operand, Operand]:
    codes, scales, transposed, transposed_scales = triton_weight_quantize_2d(weight.contiguous(), _reach(scale))
    return (codes, scales, scale), (transposed, transposed_scales, scale)


def _reach(scale: Tensor) -> Tensor:
    """Amax that corresponds to a scale; the kernels recompute the scale from it."""
    return scale * (LARGEST * E4M3.max)


def _multiply(left: Operand, right: Operand) -> Tensor:
    """Multiply left by rightᵀ, in bf16."""
    kinds = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    order = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    return F.scaled_mm(
        left[0].view(torch.float4_e2m1fn_x2),
        right[0].view(torch.float4_e2m1fn_x2).t(),
        scale_a=[left[1].flatten(), left[2]],
        scale_recipe_a=kinds,
        scale_b=[right[1].flatten(), right[2]],
        scale_recipe_b=kinds,
        swizzle_a=order,
        swizzle_b=order,
        output_dtype=torch.bfloat16,
    )
