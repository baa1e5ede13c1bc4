"""What torch's efficient attention kernel (CUTLASS) takes on CUDA, where the CPU has no such kernel to trace.

Its outputs are what torch's own meta functions say. What its backward pass takes for a moment is computed as
`_efficient_attention_backward` and `Params::workspace_size` have it (aten/src/ATen/native/transformers/cuda, the
headers of which come with torch; alike in 2.11 to 2.15), for every kernel that may be chosen: which of them fits into
the GPU's shared memory is known to the compiler alone, so the largest counts. It is an upper bound, and a close one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_exp.ops.attention import attention_with_lse as partial_attention
from titan_exp.ops.attention import sdpa as attention
from titan_exp.plan.cuda.caching_allocator import rounded

FORWARD = torch.ops.aten._scaled_dot_product_efficient_attention.default
BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
MASK_ALIGNMENT = 8
"""Numbers of a mask's row that the kernel loads at once: `mem_eff_alignment` of aten's attention.cpp."""
IN_REGISTERS = 128
"""Widest head whose output the forward kernels accumulate in registers (`kMaxK` in cutlassF.h)."""


@dataclass(frozen=True)
class Kernel:
    """A backward kernel of `dispatch_cutlassB_*_sm80` without dropout (cutlassB.h)."""

    widest: int
    """Widest head that it takes: `kMaxK`."""
    rows: int
    """Queries of a tile: `kBlockSizeI`."""
    keys: int
    """Keys of a tile: `kBlockSizeJ`."""

    def workspace(self, shape: tuple[int, int, int, int], keys: int, *, half: bool) -> int:
        """Bytes of the workspace, as `Params::workspace_size` counts them.

        Args:
            shape: of the queries: [batch, heads, rows, head_dim].
            keys: how many.
            half: whether numbers have 16 bits.
        """
        batch, heads, rows, width = shape
        # Tiles of the queries' gradient with a lock, a counter and padding each.
        tile = self.rows * self.keys + 4
        numbers = -(-rows // self.rows) * -(-width // self.keys) * tile
        if half and not self.widest <= self.rows:
            # Gradients of keys and values, for each part that the keys are split into.
            splits = -(-keys // self.keys)
            if batch * heads >= 256 and keys <= 2 * self.keys:
                splits = 1
            splits = max(1, min(splits, 200 // (batch * heads)))
            numbers += 2 * splits * self.keys * _up(width, self.rows)
        return batch * heads * _up(numbers, 4) * 4


HALF = (Kernel(32, 64, 64), Kernel(64, 64, 64), Kernel(128, 128, 128), Kernel(128, 64, 64))
SINGLE = (Kernel(32, 64, 64), Kernel(64, 64, 64), Kernel(128, 128, 64), Kernel(128, 64, 64))
WIDE = (Kernel(65536, 128, 64), Kernel(65536, 64, 64))
"""Those of 16 bits, of fp32, and of both for wide heads."""
SURE = 64
"""Up to this width the first kernel that takes the head is the one: with its tiles of 64 x 64 numbers of 16 bits it is
used as it is on GPUs of 99 KiB of shared memory too (cutlassB.h tells them apart only for wider heads)."""


def largest_workspace(shape: tuple[int, int, int, int], keys: int, *, half: bool) -> int:
    """Bytes of the workspace of whichever backward kernel takes most; arguments are those of `Kernel.workspace`."""
    width = shape[3]
    may = [kernel for kernel in (*(HALF if half else SINGLE), *WIDE) if kernel.widest >= width]
    if half and width <= SURE:
        may = may[:1]
    return max(kernel.workspace(shape, keys, half=half) for kernel in may)


def passing(operator: Any, args: tuple[Any, ...]) -> int:
    """Bytes that a call of this kernel takes and gives back, at most; 0 of any other."""
    if operator is FORWARD:
        query, value = args[0], args[2]
        accumulated = query.dtype != torch.float32 and max(query.shape[3], value.shape[3]) > IN_REGISTERS
        return rounded(4 * query.shape[0] * query.shape[1] * query.shape[2] * value.shape[3]) if accumulated else 0
    if operator is not BACKWARD:
        return 0
    gradient, query, key = args[0], args[1], args[2]
    half, copy = query.dtype != torch.float32, gradient.transpose(1, 2)
    copied = 0 if copy.is_contiguous() else rounded(gradient.numel() * gradient.element_size())
    # Sums of gradient times output over each row; in fp32 not by the kernel, but of a product that is written down.
    sums = rounded(4 * query.numel() // query.shape[3])
    product = 0 if half else rounded(4 * gradient.numel()) + sums
    workspace = rounded(largest_workspace(tuple(query.shape), key.shape[2], half=half))
    return copied + sums + max(product, workspace)


def uses_efficient_attention(parts: Iterable[nn.Module]) -> bool:
    """Whether attention somewhere in these modules is by this kernel."""
    return any(getattr(module, "backend", None) == "efficient" for part in parts for module in part.modules())


@contextmanager
def efficient_kernel() -> Iterator[None]:
    """For the time of the block, let attention be by the operator of this kernel, which no CPU has."""
    with (
        patch.object(attention.F, "scaled_dot_product_attention", _attend),
        patch.object(partial_attention, "takes_the_cpus", lambda *_: False),
    ):
        yield


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """What `scaled_dot_product_attention` does with this kernel."""
    assert not enable_gqa, "the kernel takes no groups"
    keeps = torch.is_grad_enabled() and any(it.requires_grad for it in (query, key, value))
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, keeps, 0.0, is_causal)[0]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as aten hands it over: numbers to add, rows where the kernel can load them, the same for every head."""
    if mask.dtype == torch.bool:
        hidden = torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=mask.device)
        mask = torch.where(mask, 0.0, hidden)
    if any(step % MASK_ALIGNMENT for step in mask.stride()[:-1]):
        keys = mask.shape[-1]
        mask = F.pad(mask, (0, MASK_ALIGNMENT - keys % MASK_ALIGNMENT))[..., :keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
