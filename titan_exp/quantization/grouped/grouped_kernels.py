"""torchao's grouped kernels: rowwise float8 on Hopper and Blackwell, MXFP8 on Blackwell.

They require padded groups per expert, and return outputs and gradients in bf16.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from titan_exp.ops.import_torchao import import_torchao
from titan_exp.ops.moe.token_padding import TokenPadding
from titan_exp.quantization.hardware_support import GROUPED_MULTIPLE

with import_torchao():
    from torchao.prototype.moe_training import (
        _to_fp8_rowwise_then_scaled_grouped_mm,
        _to_mxfp8_then_scaled_grouped_mm,
    )


def float8_rowwise_grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [tokens, inputs] · weight[expert]ᵀ [experts, outputs, inputs] in e4m3 with power-of-two scales.

    All three matmuls of forward and backward are quantized; dims are multiples of 16.
    """
    padding = TokenPadding.of(ends, x.shape[0], GROUPED_MULTIPLE["float8_rowwise"])
    out = _to_fp8_rowwise_then_scaled_grouped_mm(
        padding.spread(x),
        weight.contiguous().mT,
        padding.ends,
        out_dtype=torch.bfloat16,
        float8_dtype=torch.float8_e4m3fn,
        pad_token_groups_for_grouped_mm=False,
    )
    return padding.collect(out).to(x.dtype)


def mxfp8_grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x [tokens, inputs] · weight[expert]ᵀ [experts, outputs, inputs] in MXFP8.

    All three matmuls of forward and backward are quantized; dims are multiples of 128.
    """
    padding = TokenPadding.of(ends, x.shape[0], GROUPED_MULTIPLE["mxfp8"])
    out = _to_mxfp8_then_scaled_grouped_mm(
        padding.spread(x),
        weight.contiguous().mT,
        offs=padding.ends,
        out_dtype=torch.bfloat16,
        wgrad_with_hp=False,
        pad_token_groups_for_grouped_mm=False,
    )
    return padding.collect(out).to(x.dtype)


KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "float8_rowwise": float8_rowwise_grouped,
    "mxfp8": mxfp8_grouped,
}
"""Grouped matmuls by recipe."""
