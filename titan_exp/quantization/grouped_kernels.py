"""torchao's grouped kernels: rowwise float8 on Hopper and Blackwell, MXFP8 on Blackwell.

They require padded groups per expert, and return outputs and gradients in bf16. Rows after the last end come out
uninitialized.
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from titan_exp.config.errors.user_error import UserError
from titan_exp.config.torch_features import import_torchao
from titan_exp.ops.autograd import in_type, needs_input_grad
from titan_exp.ops.float8 import E4M3, cast_tokens
from titan_exp.ops.moe.permutation import PaddedOrder, copy_tokens, sum_rows

try:
    with import_torchao():
        from torchao.prototype.moe_training import (
            _to_fp8_rowwise_then_scaled_grouped_mm,
            _to_mxfp8_then_scaled_grouped_mm,
            fp8_grouped_mm,
        )
except (ImportError, ValueError) as error:  # Triton refuses its kernels, as torch 2.15's Triton does with 0.18
    raise UserError(
        f"The expert kernels of torchao {version('torchao')} do not work with torch {torch.__version__}: {error}. "
        "Install versions that go together (torchao 0.18 with torch 2.14), or keep the experts in high precision: "
        "quantization.filter=['*.experts.*']"
    ) from error

CASTS = (
    "triton_fp8_colwise_3d_scale_and_cast",
    "triton_fp8_rowwise_2d_scale_and_cast",
    "triton_fp8_rowwise_3d_transpose_rhs",
    "triton_fp8_per_group_colwise_scales_dual",
)
"""torchao's casts of weights and gradients; versions before 0.18 had others."""


def float8_rowwise_grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Compute x [rows, inputs] · weight[expert]ᵀ [experts, outputs, inputs] in e4m3 with power-of-two scales. All three
    matmuls of forward and backward are quantized; dims are multiples of 16."""
    options = {"out_dtype": torch.bfloat16, "float8_dtype": E4M3, "pad_token_groups_for_grouped_mm": False}
    return _to_fp8_rowwise_then_scaled_grouped_mm(x, weight.contiguous().mT, ends, **options).to(x.dtype)


def float8_rowwise_of_tokens(tokens: Tensor, weight: Tensor, order: PaddedOrder) -> Tensor:
    """Apply `float8_rowwise_grouped` to the padded rows of tokens, which are copied and cast in one pass. Backward
    keeps the tokens and copies them again for the weight's gradient."""
    return _Float8OfTokens.apply(tokens, weight.contiguous(), order.inverse, order.padding, order.ends)  # type: ignore[return-value]  # a Tensor


def mxfp8_grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Compute x [rows, inputs] · weight[expert]ᵀ [experts, outputs, inputs] in MXFP8. All three matmuls of forward and
    backward are quantized; dims are multiples of 128."""
    options = {"out_dtype": torch.bfloat16, "wgrad_with_hp": False, "pad_token_groups_for_grouped_mm": False}
    return _to_mxfp8_then_scaled_grouped_mm(x, weight.contiguous().mT, offs=ends, **options).to(x.dtype)


class _Float8OfTokens(torch.autograd.Function):
    """Casts and matmuls of torchao's own function, applied to padded rows of tokens."""

    @staticmethod
    def forward(  # noqa: PLR0917  # autograd functions take positional arguments
        ctx: Any, tokens: Tensor, weight: Tensor, inverse: Tensor, padding: Tensor, ends: Tensor
    ) -> Tensor:
        ctx.save_for_backward(tokens, weight, inverse, padding, ends)
        rows, scales = cast_tokens(tokens.contiguous(), inverse, padding)
        right, right_scales = _cast("triton_fp8_colwise_3d_scale_and_cast", weight.mT)
        return in_type(_multiply(rows, scales, right, right_scales.squeeze(1), ends), tokens.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tokens, weight, inverse, padding, ends = ctx.saved_tensors
        gradient = gradients[0].to(torch.bfloat16).contiguous()
        tokens_grad, weight_grad = None, None
        needs_tokens_grad, needs_weight_grad = needs_input_grad(ctx)
        if needs_tokens_grad:
            left, scales = _cast("triton_fp8_rowwise_2d_scale_and_cast", gradient)
            right, right_scales = _cast("triton_fp8_rowwise_3d_transpose_rhs", weight.mT)
            rows_grad = _multiply(left, scales.squeeze(-1), right, right_scales.squeeze(1), ends)
            tokens_grad = sum_rows(rows_grad.to(tokens.dtype), inverse, None)
        if needs_weight_grad:
            rows = copy_tokens(tokens.contiguous(), inverse, padding)
            left, scales, right, right_scales = _cast("triton_fp8_per_group_colwise_scales_dual", gradient, rows, ends)
            weight_grad = _multiply(left.t(), scales, right, right_scales, ends).to(weight.dtype)
        return tokens_grad, weight_grad, None, None, None


def _cast(name: str, *tensors: Tensor) -> Any:
    return getattr(fp8_grouped_mm, name)(*tensors, E4M3, round_scales_to_power_of_2=True)


def _multiply(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, ends: Tensor) -> Tensor:
    scales = left_scales.reciprocal(), right_scales.reciprocal()
    return torch._scaled_grouped_mm(left, right, *scales, ends, out_dtype=torch.bfloat16, use_fast_accum=True)


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "float8_rowwise": float8_rowwise_grouped,
    "mxfp8": mxfp8_grouped,
}
"""Grouped matmuls of padded rows, by recipe."""
OF_TOKENS: dict[str, Callable[[Tensor, Tensor, PaddedOrder], Tensor]] = (
    {"float8_rowwise": float8_rowwise_of_tokens} if all(hasattr(fp8_grouped_mm, name) for name in CASTS) else {}
)
"""Grouped matmuls that take tokens instead of their rows, by recipe."""
