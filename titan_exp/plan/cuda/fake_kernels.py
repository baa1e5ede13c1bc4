"""Fake CUDA kernels: saved tensors and workspaces of kernels that differ between CUDA and CPU.

Each replaces a torch function while a step is traced for CUDA, and returns fake tensors of the kernel's sizes. Each
was compared with its kernel on real GPUs.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.plan.cuda.grouped_casts import fake_casts
from titan_exp.plan.cuda.mem_efficient_attention import workspace_bytes
from titan_exp.plan.trace.torch_patches import GPU, replaced_attributes
from titan_exp.quantization.hardware_support import GROUPED_MULTIPLE, MIN_CAPABILITY, Hardware, assume_hardware

FLASH_ROWS, FLASH_WIDTH = 128, 32
"""Multiples to which flash attention's backward pass rounds rows and head_dim up."""

_PLAIN_RMS_NORM = F.rms_norm
_MULTIPROCESSORS: ContextVar[int | None] = ContextVar("multiprocessors", default=None)
"""Streaming multiprocessors of the GPU, if attention is deterministic."""


@contextmanager
def fake_cuda_kernels(*, beside: bool = False) -> Iterator[None]:
    """Replace torch functions that have separate CUDA kernels in the `with` block.

    `beside` is True if host tensors exist in addition to those of the fake GPU.
    """
    replacements: list[tuple[Any, str, Any]] = [
        (F, "rms_norm", _rms_norm),
        # Selects code paths with CUDA-only kernels.
        (FakeTensor, "is_cuda", property(lambda tensor: not beside or tensor.device == GPU)),
    ]
    # torchao's cast kernel needs Triton; the rest of its MX matmuls runs unchanged.
    for module in ("mx_formats.mx_tensor", "moe_training.mxfp8_grouped_mm"):
        if (torchao := sys.modules.get(f"torchao.prototype.{module}")) is not None:
            replacements.append((torchao, "triton_to_mxfp8_dim0", _to_mxfp8))
    replacements += fake_casts()
    with replaced_attributes(*replacements):
        yield


@dataclass(frozen=True)
class _FakeHardware(Hardware):
    capability: tuple[int, int] | None

    def has_instructions(self, recipe: str, device: torch.device) -> bool:
        return self.capability is not None and self.capability >= MIN_CAPABILITY[recipe]

    def has_grouped_kernels(self, recipe: str, device: torch.device) -> bool:
        # Called for models with experts, on a GPU with the recipe's instructions.
        from titan_exp.quantization.grouped_kernels import OF_TOKENS

        if recipe in GROUPED_MULTIPLE and not OF_TOKENS:
            reason = "of torchao before 0.18, the casts of its grouped matmuls are not known without a GPU"
            remedy = "a newer torchao, or a quantization.filter that names the experts"
            raise UserError("This run cannot be planned.", [Violation("quantization.recipe", recipe, reason, remedy)])
        return recipe in GROUPED_MULTIPLE


def fake_cuda_capability(capability: tuple[int, int] | None) -> AbstractContextManager[None]:
    """Assume a GPU of this compute capability in quantization recipes; None for no CUDA."""
    return assume_hardware(_FakeHardware(capability))


@contextmanager
def deterministic_attention(multiprocessors: int | None) -> Iterator[None]:
    """Assume flash attention's deterministic backward pass in the `with` block; None for the usual one."""
    token = _MULTIPROCESSORS.set(multiprocessors)
    try:
        yield
    finally:
        _MULTIPROCESSORS.reset(token)


def workspaces(operator: Any, args: tuple[Any, ...]) -> list[int]:
    """Workspaces of a call's CUDA kernel beyond the CPU kernel's, in bytes, in the order of their allocation."""
    if operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        query, key = args[1], args[2]
        batch, heads, rows, width = query.shape
        rows, wide = -(-rows // FLASH_ROWS) * FLASH_ROWS, -(-width // FLASH_WIDTH) * FLASH_WIDTH
        # The deterministic kernel adds up dQ in a fixed order, from one copy per wave of thread blocks.
        multiprocessors = _MULTIPROCESSORS.get()
        copies = 1 if multiprocessors is None else -(-multiprocessors // (batch * heads))
        # fp32 accumulators of each row and of dQ; dK and dV per query head of a group.
        sums = batch * heads * rows * 4
        shared = 0 if key.shape[1] == heads else batch * heads * key.shape[2] * width * query.element_size()
        return [sums, sums * copies * wide, shared, shared]
    return [workspace_bytes(operator, args)]


def _to_mxfp8(x: Tensor, inner_block_size: int = 32, scaling_mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """Float8 values, and one scale per block of a row, in the layout of torchao's kernel."""
    assert x.is_contiguous(), "required by the kernel"
    assert x.dtype == torch.bfloat16, "required by the kernel"
    assert scaling_mode in ("floor", "rceil"), "required by the kernel"
    rows = x.reshape(-1, x.shape[-1])
    assert rows.shape[1] % inner_block_size == 0, "blocks are whole"
    numbers = rows.to(torch.float8_e4m3fn)
    scales = torch.empty(rows.shape[0], rows.shape[1] // inner_block_size, dtype=torch.uint8, device=x.device)
    blocks = (*x.shape[:-1], scales.shape[-1])
    return numbers.reshape(x.shape), scales.reshape(blocks).view(torch.float8_e8m0fnu)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if torch.compiler.is_compiling():
        return _PLAIN_RMS_NORM(x, shape, weight, eps)
    return _Norm.apply(x, weight)  # type: ignore[return-value]  # a Tensor


class _Norm(torch.autograd.Function):
    """Fused RMSNorm: saves its input and one fp32 value per row. Its operators move as many bytes as the kernels.

    Both kernels first copy an input that is not contiguous, such as the queries among projected heads.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        y = x.contiguous().clone()
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return gradients[0].contiguous() + x.contiguous(), None if weight is None else weight.clone()
