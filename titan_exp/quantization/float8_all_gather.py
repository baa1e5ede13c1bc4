"""Float8 all-gather: weights are quantized per shard and gathered as bytes, half of bf16's traffic.

`WeightScales` quantizes a shard once per optimizer step, and every gather until the next sends the same bytes; bytes,
because gloo does not support float8.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan_exp.ops.local_tensor import local_tensor
from titan_exp.quantization.float8.float8_tensor import E4M3
from titan_exp.quantization.recipes import Float8LinearImpl
from titan_exp.quantization.torchao import Float8TrainingTensor, GemmInputRole

Form = tuple[Callable[[Tensor, torch.dtype], Tensor], Callable[[Tensor, torch.dtype], Tensor]]


def float8_all_gather_format(module: nn.Module) -> Form | None:
    """All-gather format of a module's evenly sharded weight in float8, with the bytes to send allocated; None if it is
    not quantized with a precomputed scale, or replicated by tensor-parallel ranks, which quantize the rows they use.
    """
    if getattr(module, "rows", None) is not None:
        return None
    linear_impl = getattr(module, "linear_impl", None)
    if not isinstance(linear_impl, Float8LinearImpl) or linear_impl.recipe.rowwise or linear_impl.weight_scale is None:
        return None
    scale = linear_impl.weight_scale
    sent = linear_impl.sent_shard = torch.zeros_like(local_tensor(module.get_parameter("weight")), dtype=torch.uint8)

    def encode(_: Tensor, __: torch.dtype) -> Tensor:
        return sent

    def decode(gathered: Tensor, dtype: torch.dtype) -> Tensor:
        return Float8TrainingTensor(gathered.view(E4M3), scale, dtype, None, GemmInputRole.WEIGHT)

    return encode, decode
