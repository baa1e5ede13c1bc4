"""The products of experts by torchao's kernels: float8 row by row on Hopper and Blackwell, MXFP8 on Blackwell.

They want each expert's rows in whole groups, and outputs and their gradients go through bf16.
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
    """x · weight[expert]ᵀ, all three products of forward and backward in e4m3, scales powers of two.

    Args:
        x: [tokens, inputs], rows sorted by expert.
        weight: [experts, outputs, inputs]; dims are multiples of 16.
        ends: where the rows of each expert end.
    """
    aligned = TokenPadding.of(ends, x.shape[0], GROUPED_MULTIPLE["float8_rowwise"])
    product = _to_fp8_rowwise_then_scaled_grouped_mm(
        aligned.spread(x),
        weight.contiguous().mT,
        aligned.ends,
        out_dtype=torch.bfloat16,
        float8_dtype=torch.float8_e4m3fn,
        pad_token_groups_for_grouped_mm=False,
    )
    return aligned.collect(product).to(x.dtype)


def mxfp8_grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x · weight[expert]ᵀ, all three products of forward and backward in MXFP8.

    Args:
        x: [tokens, inputs], rows sorted by expert.
        weight: [experts, outputs, inputs]; dims are multiples of 128.
        ends: where the rows of each expert end.
    """
    aligned = TokenPadding.of(ends, x.shape[0], GROUPED_MULTIPLE["mxfp8"])
    product = _to_mxfp8_then_scaled_grouped_mm(
        aligned.spread(x),
        weight.contiguous().mT,
        offs=aligned.ends,
        out_dtype=torch.bfloat16,
        wgrad_with_hp=False,
        pad_token_groups_for_grouped_mm=False,
    )
    return aligned.collect(product).to(x.dtype)


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "float8_rowwise": float8_rowwise_grouped,
    "mxfp8": mxfp8_grouped,
}
"""By recipe."""
