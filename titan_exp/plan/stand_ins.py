"""What CUDA's kernels keep and take for a moment where the CPU's do otherwise, for tensors that only pretend.

Each takes the place of a call of torch's while a step is traced for CUDA, and makes tensors of the sizes that the
kernel makes; values are never computed. Compared with real GPUs elsewhere, one kernel at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

FLASH_ROWS, FLASH_WIDTH = 128, 32
"""What flash attention's backward pass rounds rows and head_dim up to."""


class CudaCalls(TorchFunctionMode):
    """While it is entered, calls that CUDA answers by a kernel of its own are answered by its sizes."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Make the call, or what stands in for it."""
        if func is F.rms_norm:
            return _rms_norm(*args, **(kwargs or {}))
        if func is torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        return func(*args, **(kwargs or {}))


def workspace(operator: Any, args: tuple[Any, ...]) -> int:
    """Bytes that CUDA's kernel of a call takes and gives back, and the CPU's does not."""
    if operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        query, key = args[1], args[2]
        batch, heads, rows, width = query.shape
        rows, wide = -(-rows // FLASH_ROWS) * FLASH_ROWS, -(-width // FLASH_WIDTH) * FLASH_WIDTH
        # Sums of the queries' gradient and of each row in fp32; keys' gradients for every head of a group.
        sums = batch * heads * rows * (wide + 1) * 4
        shared = 0 if key.shape[1] == heads else 2 * batch * heads * key.shape[2] * width * query.element_size()
        return sums + shared
    return 0


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    assert weight is not None, "the models' norms have weights"
    return _Norm.apply(x, weight)  # type: ignore[return-value]  # a Tensor


class _Norm(torch.autograd.Function):
    """One kernel forward, which keeps its input and a number for each row; one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


Workspace = Callable[[Any, tuple[Any, ...]], int]
"""Bytes that a call takes for a moment beyond what its tensors hold."""
