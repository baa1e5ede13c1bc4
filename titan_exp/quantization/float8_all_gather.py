"""Float8 all-gather: weights are quantized per shard and gathered as bytes, half of bf16's traffic.

A shard is first rounded to the compute dtype, so that the numbers equal those of a bf16 all-gather; torchao casts from
fp32 directly. Bytes, because gloo does not support float8.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan_exp.quantization.float8.float8_tensor import E4M3, cast
from titan_exp.quantization.recipes import Float8LinearImpl
from titan_exp.quantization.torchao import Float8TrainingTensor, GemmInputRole

Form = tuple[Callable[[Tensor, torch.dtype], Tensor], Callable[[Tensor, torch.dtype], Tensor]]


def float8_all_gather_format(module: nn.Module) -> Form | None:
    """All-gather format of a module's weight in float8; None if it is not quantized with a precomputed scale, or
    replicated by tensor-parallel ranks, which quantize the rows that they use."""
    if getattr(module, "rows", None) is not None:
        return None
    linear_impl = getattr(module, "linear_impl", None)
    if not isinstance(linear_impl, Float8LinearImpl) or linear_impl.recipe.rowwise or linear_impl.weight_scale is None:
        return None
    scale = linear_impl.weight_scale

    def encode(shard: Tensor, dtype: torch.dtype) -> Tensor:
        return cast(shard.to(dtype), scale, E4M3).view(torch.uint8)

    def decode(gathered: Tensor, dtype: torch.dtype) -> Tensor:
        return Float8TrainingTensor(gathered.view(E4M3), scale, dtype, None, GemmInputRole.WEIGHT)

    return encode, decode
