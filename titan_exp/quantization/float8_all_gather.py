"""Weights quantized shard by shard and gathered as bytes: half of what bf16 sends, and the same numbers.

A shard is rounded to the type that the weight is computed in first, as it would be on its way; torchao goes from fp32
to float8 at once. Bytes, because gloo does not know float8.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan_exp.quantization.float8.float8_tensor import E4M3, cast
from titan_exp.quantization.recipes import Float8LinearImpl
from titan_exp.quantization.torchao import Float8TrainingTensor, GemmInputRole

Form = tuple[Callable[[Tensor, torch.dtype], Tensor], Callable[[Tensor, torch.dtype], Tensor]]


def float8_all_gather_format(module: nn.Module) -> Form | None:
    """All-gather format of a module's weight in float8; None if the weight is not quantized as a
    whole, or by a scale that a shard does not know."""
    product = getattr(module, "linear_impl", None)
    if not isinstance(product, Float8LinearImpl) or product.recipe.rowwise or product.weight_scale is None:
        return None
    scale = product.weight_scale

    def encode(shard: Tensor, dtype: torch.dtype) -> Tensor:
        return cast(shard.to(dtype), scale, E4M3).view(torch.uint8)

    def decode(gathered: Tensor, dtype: torch.dtype) -> Tensor:
        return Float8TrainingTensor(gathered.view(E4M3), scale, dtype, None, GemmInputRole.WEIGHT)

    return encode, decode
