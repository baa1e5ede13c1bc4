"""Float8 cast of tokens to the rows of their experts: permutation, padding and rowwise cast in one pass.

A token is read once, and scaled once for all of its choices.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.ops.runs_kernel import runs_kernel

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
EPS = 1e-12
"""Least amax, that of torchao."""
SCALE_OF_ZEROS = 2.0**48
"""The power of two below LARGEST / EPS."""
BLOCK = 1024
"""Columns that a kernel program has at a time."""


@torch.library.custom_op("titan_exp::cast_tokens", mutates_args=())
def cast_tokens(x: Tensor, inverse: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a `PaddedOrder` of `x` [tokens, dim] in e4m3, and their scales, powers of two, in fp32.

    They are to the bit torchao's rowwise cast of the permuted and padded tokens, of finite ones.
    """
    rows, scales = _empty_rows(x, inverse, padding)
    # Bits of zeros.
    rows.view(torch.uint8).index_fill_(0, padding, 0)
    scales.index_fill_(0, padding, SCALE_OF_ZEROS)
    if runs_kernel(x):
        if not isinstance(x, FakeTensor) and x.numel():
            from titan_exp.ops.float8.kernels import cast_tokens_kernel

            launch: Any = cast_tokens_kernel[(x.shape[0],)]
            sizes = {"choices": inverse.shape[1], "block": BLOCK}
            launch(x.contiguous(), inverse.contiguous(), rows, scales, x.shape[1], EPS, LARGEST, **sizes)
        return rows, scales
    amax = x.abs().amax(1).double().clamp(min=EPS)
    scale = (LARGEST / amax).float().log2().floor().exp2()
    cast = (x.float() * scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3)
    for choice in inverse.unbind(1):
        rows.view(torch.uint8).index_copy_(0, choice, cast.view(torch.uint8))
        scales.index_copy_(0, choice, scale)
    return rows, scales


@cast_tokens.register_fake
def _empty_rows(x: Tensor, inverse: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
    room = inverse.numel() + padding.shape[0]
    return x.new_empty(room, x.shape[1], dtype=E4M3), x.new_empty(room, dtype=torch.float32)
