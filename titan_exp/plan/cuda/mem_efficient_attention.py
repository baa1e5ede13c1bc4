"""Memory-efficient attention (CUTLASS) on CUDA: fake operator and workspace of its kernels.

Outputs follow torch's meta functions. The backward workspace follows `_efficient_attention_backward` and
`Params::workspace_size` (aten/src/ATen/native/transformers/cuda, identical in torch 2.11 to 2.15). The choice of kernel
depends on shared memory limits known only at compile time, so the largest workspace of all candidates is counted: a
tight upper bound.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.parallel.context_parallel.attention import ContextAttention
from titan_exp.plan.cuda.caching_allocator import rounded
from titan_exp.plan.trace.torch_patches import replaced_attributes

FORWARD = torch.ops.aten._scaled_dot_product_efficient_attention.default
BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
MASK_ALIGNMENT = 8
"""Alignment of mask rows, in elements: `mem_eff_alignment` of aten's attention.cpp."""
IN_REGISTERS = 128
"""Largest head_dim whose output the forward kernels accumulate in registers (`kMaxK` in cutlassF.h)."""


@dataclass(frozen=True)
class Kernel:
    """Backward kernel of `dispatch_cutlassB_*_sm80` without dropout (cutlassB.h)."""

    widest: int
    """Largest head_dim: `kMaxK`."""
    rows: int
    """Queries per tile: `kBlockSizeI`."""
    keys: int
    """Keys per tile: `kBlockSizeJ`."""

    def workspace(self, shape: tuple[int, int, int, int], keys: int, *, half: bool) -> int:
        """Workspace bytes, as in `Params::workspace_size`, for queries [batch, heads, rows, head_dim]."""
        batch, heads, rows, width = shape
        # Tiles of dQ, each with a lock, a counter and padding.
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
"""Candidates for 16-bit dtypes, for fp32, and for wide heads."""
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
    gradient, query, key = args[0], args[1], args[2]
    half, copy = query.dtype != torch.float32, gradient.transpose(1, 2)
    copied = 0 if copy.is_contiguous() else rounded(gradient.numel() * gradient.element_size())
    # Row sums of gradient times output; in fp32 the product is materialized too.
    sums = rounded(4 * query.numel() // query.shape[3])
    product = 0 if half else rounded(4 * gradient.numel()) + sums
    workspace = rounded(largest_workspace(tuple(query.shape), key.shape[2], half=half))
    return copied + sums + max(product, workspace)


@contextmanager
def efficient_kernel(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Route attention to this kernel's operator in the `with` block, if an attention module uses it."""
    modules = [module for part in parts for module in part.modules()]
    if all(getattr(module, "backend", None) != "efficient" for module in modules):
        yield
        return
    for module in modules:
        if isinstance(module, ContextAttention):
            module.kernel = module.backend
    with replaced_attributes((F, "scaled_dot_product_attention", _efficient_attention)):
        yield


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
    """`scaled_dot_product_attention` with this kernel."""
    assert not enable_gqa, "the kernel has no grouped-query mode"
    keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, bias, keeps, 0.0, is_causal, scale=scale)[0]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Attention bias as passed to the kernel by aten: additive, with aligned rows, expanded over heads."""
    if mask.dtype == torch.bool:
        hidden = torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=mask.device)
        mask = torch.where(mask, 0.0, hidden)
    if any(step % MASK_ALIGNMENT for step in mask.stride()[:-1]):
        keys = mask.shape[-1]
        mask = F.pad(mask, (0, MASK_ALIGNMENT - keys % MASK_ALIGNMENT))[..., :keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
