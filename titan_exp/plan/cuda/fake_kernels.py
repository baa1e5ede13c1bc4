"""What CUDA's kernels keep and take for a moment where the CPU's do otherwise, for tensors that only pretend.

Each takes the place of a call of torch's while a step is traced for CUDA, and makes tensors of the sizes that the
kernel makes; values are never computed. Compared with real GPUs elsewhere, one kernel at a time.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.parallel.pipeline_parallel import runtime as pipeline
from titan_exp.plan.cuda.cpu_offload import GPU
from titan_exp.plan.cuda.mem_efficient_attention import passing
from titan_exp.quantization import hardware_support as instructions

FLASH_ROWS, FLASH_WIDTH = 128, 32
"""What flash attention's backward pass rounds rows and head_dim up to."""

_PLAIN_RMS_NORM = F.rms_norm


@contextmanager
def fake_cuda_kernels(*, beside: bool = False) -> Iterator[None]:
    """For the time of the block, let calls that CUDA answers by a kernel of its own be answered by its sizes.

    Args:
        beside: whether there are tensors of the host's memory too, besides those of the GPU's.
    """
    with (
        _mxfp8_casts(),
        # Else the answer of a pretended process group, which is no in torch 2.13 and yes in 2.15.
        patch.object(pipeline, "has_left", lambda _: False),
        patch.object(F, "rms_norm", _rms_norm),
        # Code that asks has a kernel in mind that only CUDA has.
        patch.object(FakeTensor, "is_cuda", property(lambda it: not beside or it.device == GPU), create=True),
    ):
        yield


@contextmanager
def fake_cuda_capability(capability: tuple[int, int] | None) -> Iterator[None]:
    """For the time of the block, let recipes find the instructions of a GPU of this capability; None is no CUDA."""

    def has(recipe: str, _: torch.device) -> bool:
        return capability is not None and capability >= instructions.LEAST[recipe]

    with (
        patch.object(instructions, "_has_instructions", has),
        patch.object(instructions, "_has_grouped_kernels", _refuse_grouped_kernels),
    ):
        yield


def _refuse_grouped_kernels(recipe: str, _: torch.device) -> bool:
    """Asked of a model with experts alone, where a GPU has the recipe's instructions."""
    if recipe not in instructions.GROUPED_MULTIPLE:
        return False
    reason = "its products of experts are Triton kernels of torchao's, which are not there without a GPU"
    violation = Violation("quantization.recipe", recipe, reason, "a quantization.filter that names the experts")
    raise UserError("This run cannot be planned.", [violation])


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
    return passing(operator, args)


def _mxfp8_casts() -> AbstractContextManager[Any]:
    """Stands in for torchao's cast kernel, which needs Triton; all else of its products is its own code."""
    module = sys.modules.get("torchao.prototype.mx_formats.mx_tensor")
    return nullcontext() if module is None else patch.object(module, "triton_to_mxfp8_dim0", _to_mxfp8)


def _to_mxfp8(x: Tensor, inner_block_size: int = 32, scaling_mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """Numbers and scales, one for every block of a row, as torchao's kernel lays them down."""
    assert x.is_contiguous(), "as the kernel asks"
    assert x.dtype == torch.bfloat16, "as the kernel asks"
    assert scaling_mode in ("floor", "rceil"), "as the kernel asks"
    rows = x.reshape(-1, x.shape[-1])
    assert rows.shape[1] % inner_block_size == 0, "blocks are whole"
    numbers = rows.to(torch.float8_e4m3fn)
    scales = torch.empty(rows.shape[0], rows.shape[1] // inner_block_size, dtype=torch.uint8, device=x.device)
    blocks = (*x.shape[:-1], scales.shape[-1])
    return numbers.reshape(x.shape), scales.reshape(blocks).view(torch.float8_e8m0fnu)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    assert weight is not None, "the models' norms have weights"
    if torch.compiler.is_compiling():
        return _PLAIN_RMS_NORM(x, shape, weight, eps)
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
