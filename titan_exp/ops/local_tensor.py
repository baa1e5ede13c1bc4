"""Local shard of a DTensor, and embedding lookup in it."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is. Differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def embedding_rows(
    ids: Int[Tensor, "*any"], weight: Float[Tensor, "rows dim"], dtype: torch.dtype | None = None
) -> Float[Tensor, "*any dim"]:
    """Rows of this rank's shard of `weight`, rounded to `dtype`; None is the weight's. Only these rows are rounded.

    The same bits as of a rounded weight, whose gradient has `dtype` too: `weight.grad_dtype` must allow it.
    """
    if dtype is None or weight.dtype == dtype:
        return F.embedding(ids, local_tensor(weight))
    return _RoundedRows.apply(weight, ids, dtype)


class _RoundedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, local_tensor(weight)).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        rows = local_tensor(weight).shape[0]
        gradient = torch.ops.aten.embedding_dense_backward(gradients[0], ids, rows, -1, False)
        if isinstance(weight, DTensor):
            whole: dict[str, Any] = {"shape": weight.shape, "stride": weight.stride()}
            gradient = DTensor.from_local(gradient, weight.device_mesh, weight.placements, run_check=False, **whole)
        return gradient, None, None
