"""Fake CUDA kernels: saved tensors, results and workspaces of kernels that differ between CUDA and CPU.

Each replaces a torch function while a step is traced for CUDA, and returns fake tensors of the kernel's sizes. Each
was compared with its kernel on real GPUs. Casts of torchao's grouped matmuls have the shapes and strides of torchao
0.18, whose own fake kernels exist only beside a GPU.

Memory-efficient attention (CUTLASS): outputs follow torch's meta functions, the backward workspace
`_efficient_attention_backward` and `Params::workspace_size` (aten/src/ATen/native/transformers/cuda, identical in torch
2.11 to 2.15). The choice of kernel depends on shared memory limits known only at compile time, so the largest workspace
of all candidates is counted: a tight upper bound.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.parallel.context_parallel.attention import ContextAttention
from titan_exp.plan.caching_allocator import rounded
from titan_exp.plan.trace.torch_patches import GPU, replaced_attributes
from titan_exp.quantization.recipes import GROUPED_MULTIPLE, MIN_CAPABILITY, Hardware, assume_hardware

BLOCK = 32  # number of elements that share an MXFP8 scale
TILE_ROWS, TILE_COLUMNS = 128, 4  # multiples to which the rows and columns of MXFP8 scales are padded
_E4M3, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def _kernel(body: Callable[..., Any]) -> Callable[..., Any]:
    """Make a custom operator that takes a cast's tensors and ignores its options."""
    operator = torch.library.custom_op(f"titan_exp::{body.__name__}", mutates_args=())(body)
    operator.register_fake(body)
    tensors = body.__code__.co_argcount
    return lambda *args, **_: operator(*args[:tensors])


@_kernel
def fp8_columns_of_experts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast [experts, inputs, outputs] by columns, column-major."""
    return _by_columns(x), x.new_empty(x.shape[0], 1, x.shape[2], dtype=torch.float32)


@_kernel
def fp8_transposed_rows_of_experts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast [experts, inputs, outputs] by rows, transposed and column-major."""
    return _by_columns(x.mT), x.new_empty(x.shape[:2], dtype=torch.float32)


@_kernel
def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast [rows, columns] by rows."""
    return torch.empty_like(x, dtype=_E4M3), x.new_empty(x.shape[0], 1, dtype=torch.float32)


@_kernel
def fp8_columns_of_groups(x: Tensor, y: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast two matrices [rows, columns] by columns of each group of rows, column-major."""
    x_scales, y_scales = (each.new_empty(each.shape[1] * ends.shape[0], dtype=torch.float32) for each in (x, y))
    return _by_columns(x), x_scales, _by_columns(y), y_scales


@_kernel
def mxfp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast [rows, columns] by blocks of rows, with padded scales."""
    return torch.empty_like(x, dtype=_E4M3), x.new_empty(_tiled(x.shape[0], x.shape[1] // BLOCK), dtype=_E8M0)


@_kernel
def mxfp8_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast [rows, columns] by blocks of columns, column-major; the scales are the transposed matrix's."""
    return _by_columns(x), x.new_empty(x.shape[0] // BLOCK, x.shape[1], dtype=_E8M0).mT


@_kernel
def mxfp8_columns_of_experts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cast [experts, outputs, inputs] by blocks of columns, column-major, with padded scales."""
    experts, outputs, inputs = x.shape
    return _by_columns(x), x.new_empty(experts, prod(_tiled(inputs, outputs // BLOCK)), dtype=_E8M0)


@_kernel
def mxfp8_padded_scales_of_experts(scales: Tensor) -> Tensor:
    """Tile the scales [experts, rows, columns]."""
    experts, rows, columns = scales.shape
    return scales.new_empty(experts, prod(_tiled(rows, columns)))


@_kernel
def mxfp8_padded_scales_of_groups(scales: Tensor, ends: Tensor) -> Tensor:
    """Tile the scales [rows, columns] of each group of columns."""
    rows, columns = scales.shape
    return scales.new_empty(_tiled(rows, 0)[0], columns + TILE_COLUMNS * ends.shape[0])


def _by_columns(x: Tensor) -> Tensor:
    return x.new_empty(x.mT.shape, dtype=_E4M3).mT


def _tiled(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of MXFP8 scales, padded to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def _quantized_columns(x: Tensor, **_: Any) -> tuple[None, Tensor, None, Tensor]:
    data, scales = mxfp8_columns(x)
    return None, data, None, scales


def _to_mxfp8(x: Tensor, inner_block_size: int = 32, scaling_mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """Float8 values with one scale per block of a row, in the layout of torchao's kernel."""
    assert x.is_contiguous(), "required by the kernel"
    assert x.dtype == torch.bfloat16, "required by the kernel"
    assert scaling_mode in ("floor", "rceil"), "required by the kernel"
    rows = x.reshape(-1, x.shape[-1])
    assert rows.shape[1] % inner_block_size == 0, "blocks are whole"
    numbers = rows.to(torch.float8_e4m3fn)
    scales = torch.empty(rows.shape[0], rows.shape[1] // inner_block_size, dtype=torch.uint8, device=x.device)
    blocks = (*x.shape[:-1], scales.shape[-1])
    return numbers.reshape(x.shape), scales.reshape(blocks).view(torch.float8_e8m0fnu)


_IN = {
    "moe_training.fp8_grouped_mm": {
        "triton_fp8_colwise_3d_scale_and_cast": fp8_columns_of_experts,
        "triton_fp8_rowwise_3d_transpose_rhs": fp8_transposed_rows_of_experts,
        "triton_fp8_rowwise_2d_scale_and_cast": fp8_rows,
        "triton_fp8_per_group_colwise_scales_dual": fp8_columns_of_groups,
    },
    "moe_training.mxfp8_grouped_mm": {
        "_SM100_KERNELS_AVAILABLE": True,
        "triton_to_mxfp8_dim0": _to_mxfp8,
        "mxfp8_quantize_2d_1x32_cutedsl": mxfp8_rows,
        "mxfp8_quantize_cuda_3d": mxfp8_columns_of_experts,
        "triton_mx_block_rearrange_per_group_3d": mxfp8_padded_scales_of_experts,
        "triton_mx_block_rearrange_2d_K_groups": mxfp8_padded_scales_of_groups,
    },
    # This cast needs Triton; the rest of torchao's MX matmuls runs unchanged.
    "mx_formats.mx_tensor": {"triton_to_mxfp8_dim0": _to_mxfp8},
    "mx_formats.kernels": {"mxfp8_quantize_cuda": _quantized_columns},
}
"""Replacements in torchao's prototype modules."""


FORWARD = torch.ops.aten._scaled_dot_product_efficient_attention.default
BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
MASK_ALIGNMENT = 8  # alignment of mask rows, in elements: `mem_eff_alignment` of aten's attention.cpp
IN_REGISTERS = 128  # largest head_dim whose output the forward kernels accumulate in registers (`kMaxK` in cutlassF.h)


@dataclass(frozen=True)
class Kernel:
    """Backward kernel of `dispatch_cutlassB_*_sm80` without dropout (cutlassB.h)."""

    widest: int  # largest head_dim: `kMaxK`
    rows: int  # queries per tile: `kBlockSizeI`
    keys: int  # keys per tile: `kBlockSizeJ`

    def workspace(self, shape: tuple[int, int, int, int], keys: int, *, half: bool) -> int:
        """Workspace bytes, as in `Params::workspace_size`, for queries [batch, heads, rows, head_dim]."""
        batch, heads, rows, width = shape
        # Tiles of dQ: each has a lock, a counter and padding.
        tile = self.rows * self.keys + 4
        numbers = -(-rows // self.rows) * -(-width // self.keys) * tile
        if half and not self.widest <= self.rows:
            # dK and dV for each split of the keys.
            splits = -(-keys // self.keys)
            if batch * heads >= 256 and keys <= 2 * self.keys:
                splits = 1
            splits = max(1, min(splits, 200 // (batch * heads)))
            numbers += 2 * splits * self.keys * _round_up(width, self.rows)
        return batch * heads * _round_up(numbers, 4) * 4


HALF = (Kernel(32, 64, 64), Kernel(64, 64, 64), Kernel(128, 128, 128), Kernel(128, 64, 64))
SINGLE = (Kernel(32, 64, 64), Kernel(64, 64, 64), Kernel(128, 128, 64), Kernel(128, 64, 64))
WIDE = (Kernel(65536, 128, 64), Kernel(65536, 64, 64))
"""Candidate kernels for 16-bit dtypes, for fp32, and for wide heads."""
SINGLE_KERNEL_HEAD_DIM = 64
"""Largest head_dim for which the first candidate is always chosen in 16 bits: its 64 x 64 tiles also fit GPUs with
99 KiB of shared memory (cutlassB.h distinguishes them only for wider heads)."""


def largest_workspace(shape: tuple[int, int, int, int], keys: int, *, half: bool) -> int:
    """Largest workspace of all candidate backward kernels; arguments as in `Kernel.workspace`."""
    width = shape[3]
    candidates = [kernel for kernel in (*(HALF if half else SINGLE), *WIDE) if kernel.widest >= width]
    if half and width <= SINGLE_KERNEL_HEAD_DIM:
        candidates = candidates[:1]
    return max(kernel.workspace(shape, keys, half=half) for kernel in candidates)


def workspace_bytes(operator: Any, args: tuple[Any, ...]) -> int:
    """Upper bound of a call's workspace bytes; 0 for other operators."""
    if operator is FORWARD:
        query, value = args[0], args[2]
        accumulated = query.dtype != torch.float32 and max(query.shape[3], value.shape[3]) > IN_REGISTERS
        return rounded(4 * query.shape[0] * query.shape[1] * query.shape[2] * value.shape[3]) if accumulated else 0
    if operator is not BACKWARD:
        return 0
    gradient, query, key, *_ = args
    half = query.dtype != torch.float32
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else rounded(gradient.nbytes)
    # Row sums of gradient times output; in fp32 the product is materialized too.
    sums = rounded(4 * query.numel() // query.shape[3])
    product = 0 if half else rounded(4 * gradient.numel()) + sums
    workspace = rounded(largest_workspace(tuple(query.shape), key.shape[2], half=half))
    return copied + sums + max(product, workspace)


def efficient_kernel(parts: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Route attention to the memory-efficient operator in the `with` block, if an attention module uses that kernel."""
    modules = [module for part in parts for module in part.modules()]
    if all(getattr(module, "backend", None) != "efficient" for module in modules):
        return nullcontext()
    for module in modules:
        if isinstance(module, ContextAttention):
            module.kernel = module.backend
    return replaced_attributes((F, "scaled_dot_product_attention", _efficient_attention))


def _efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    assert not enable_gqa, "the kernel has no grouped-query mode"
    keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    # aten passes a mask as an additive bias with aligned rows, expanded over heads.
    if (bias := attn_mask) is not None:
        if bias.dtype == torch.bool:
            bias = torch.where(bias, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=bias.device))
        if any(step % MASK_ALIGNMENT for step in bias.stride()[:-1]):
            keys = bias.shape[-1]
            bias = F.pad(bias, (0, MASK_ALIGNMENT - keys % MASK_ALIGNMENT))[..., :keys]
        bias = bias.expand(*query.shape[:3], key.shape[2])
    return FORWARD(query, key, value, bias, keeps, 0.0, is_causal, scale=scale)[0]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


FLASH_ROWS, FLASH_WIDTH = 128, 32  # multiples to which flash attention's backward pass rounds up rows and head_dim
_PLAIN_RMS_NORM = F.rms_norm
_MULTIPROCESSORS: ContextVar[int | None] = ContextVar("multiprocessors", default=None)
"""Streaming multiprocessors of the GPU, if attention is deterministic."""


def fake_cuda_kernels(*, beside: bool = False) -> AbstractContextManager[None]:
    """Replace torch functions that have separate CUDA kernels in the `with` block. `beside` is True if host tensors
    exist in addition to those of the fake GPU."""
    replacements: list[tuple[Any, str, Any]] = [
        (F, "rms_norm", _rms_norm),
        # This selects code paths with CUDA-only kernels.
        (FakeTensor, "is_cuda", property(lambda tensor: not beside or tensor.device == GPU)),
    ]
    for module, casts in _IN.items():
        if (owner := sys.modules.get(f"torchao.prototype.{module}")) is not None:
            replacements += ((owner, name, fake) for name, fake in casts.items())
    return replaced_attributes(*replacements)


@dataclass(frozen=True)
class _FakeHardware(Hardware):
    capability: tuple[int, int] | None

    def has_instructions(self, recipe: str, device: torch.device) -> bool:
        return self.capability is not None and self.capability >= MIN_CAPABILITY[recipe]

    def has_grouped_kernels(self, recipe: str, device: torch.device) -> bool:
        # Called for models with experts, on a GPU with the recipe's instructions.
        from titan_exp.quantization.grouped_kernels import OF_TOKENS

        if recipe in GROUPED_MULTIPLE and not OF_TOKENS:
            reason = "without a GPU we do not know the casts of grouped matmuls in torchao before 0.18"
            remedy = "install a newer torchao, or keep the experts in bf16: quantization.filter=['*.experts.*']"
            raise UserError("We cannot plan this run.", [Violation("quantization.recipe", recipe, reason, remedy)])
        return recipe in GROUPED_MULTIPLE


def fake_cuda_capability(capability: tuple[int, int] | None) -> AbstractContextManager[None]:
    """Let quantization recipes assume a GPU of this compute capability; None means no CUDA."""
    return assume_hardware(_FakeHardware(capability))


@contextmanager
def deterministic_attention(multiprocessors: int | None) -> Iterator[None]:
    """Let flash attention assume its deterministic backward pass in the `with` block; None means the usual one."""
    token = _MULTIPROCESSORS.set(multiprocessors)
    try:
        yield
    finally:
        _MULTIPROCESSORS.reset(token)


def workspaces(operator: Any, args: tuple[Any, ...]) -> list[int]:
    """Workspaces in bytes, in order of allocation, that a call's CUDA kernel needs beyond the CPU kernel's."""
    if operator is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        query, key = args[1], args[2]
        batch, heads, rows, width = query.shape
        rows, wide = -(-rows // FLASH_ROWS) * FLASH_ROWS, -(-width // FLASH_WIDTH) * FLASH_WIDTH
        # The deterministic kernel adds up dQ in a fixed order, from one copy per wave of thread blocks.
        copies = -(-(_MULTIPROCESSORS.get() or 1) // (batch * heads))
        # fp32 accumulators of each row and of dQ; dK and dV per query head of a group.
        sums = batch * heads * rows * 4
        shared = 0 if key.shape[1] == heads else batch * heads * key.shape[2] * width * query.element_size()
        return [sums, sums * copies * wide, shared, shared]
    return [workspace_bytes(operator, args)]


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if torch.compiler.is_compiling():
        return _PLAIN_RMS_NORM(x, shape, weight, eps)
    return _Norm.apply(x, weight)  # type: ignore[return-value]  # a Tensor


class _Norm(torch.autograd.Function):
    """Fused RMSNorm: saves its input and one fp32 value per row. Its operators move as many bytes as the real kernels.
    Both kernels first copy an input that is not contiguous, such as the queries among projected heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        y = x.contiguous().clone()
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return gradients[0].contiguous() + x.contiguous(), None if weight is None else weight.clone()
