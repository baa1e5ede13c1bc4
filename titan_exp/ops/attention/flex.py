"""FlexAttention (He et al. 2024): block masks of a pattern and of segments, compiled kernels, sinks."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from titan_exp.ops.attention.mask_pattern import MaskPattern

BLOCK = 128
"""Rows and columns of a block of the score matrix."""
Blocks = Bool[Tensor, "*batch blocks blocks"]


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Any, sinks: Tensor | None, scale: float | None
) -> Tensor:
    """Attention under a block mask, in the dtype of `query`; arguments as of `CausalAttention.forward`."""
    # The compiler of a whole block reads no cache.
    kernel = _uncompiled() if torch.compiler.is_compiling() else _kernel(query.device.type)
    how = {"block_mask": mask, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if sinks is None:
        return kernel(query, key, value, **how)
    from torch.nn.attention.flex_attention import AuxRequest

    out, found = kernel(query, key, value, **how, return_aux=AuxRequest(lse=True))
    return (out * torch.sigmoid(found.lse - sinks.to(found.lse.dtype)[:, None])[..., None]).to(query.dtype)


def block_mask(pattern: MaskPattern, segments: Int[Tensor, "batch seq"]) -> Any:
    """Block mask of a causal pattern within segments."""
    seq, visible = segments.shape[1], _visible(pattern, segments.shape[1])
    some, every = _visible_blocks(pattern, seq, segments.device)
    padded = torch.arange(-(-seq // BLOCK) * BLOCK, device=segments.device).clamp(max=seq - 1)
    low, high = segments[:, padded].unflatten(1, (-1, BLOCK)).aminmax(dim=-1)
    # Segments that ascend, as documents do, are in both blocks or in neither; of others too many blocks are computed.
    some = some & (low[:, :, None] <= high[:, None]) & (low[:, None] <= high[:, :, None])
    every = every & (low[:, :, None] == high[:, None]) & (low[:, None] == high[:, :, None])
    return _create(some, every, lambda b, h, q, k: visible(q, k) & (segments[b, q] == segments[b, k]), seq)


@cache
def pattern_mask(pattern: MaskPattern, seq: int, device: str) -> Any:
    """Block mask of a causal pattern."""
    visible = _visible(pattern, seq)
    some, every = _visible_blocks(pattern, seq, torch.device(device))
    return _create(some[None], every[None], lambda b, h, q, k: visible(q, k), seq)


def _visible(pattern: MaskPattern, seq: int) -> Callable[[Tensor, Tensor], Tensor]:
    """`pattern.visible` as one expression, which FlexAttention compiles."""
    window, chunk = pattern.window or seq, pattern.chunk or seq
    if pattern.is_causal:
        return lambda q, k: q >= k
    return lambda q, k: (q >= k) & (q - k < window) & (q // chunk == k // chunk)


def _visible_blocks(pattern: MaskPattern, seq: int, device: torch.device) -> tuple[Blocks, Blocks]:
    """Blocks of the score matrix with a visible pair, and those of which every pair is visible.

    `create_block_mask` of torch looks at every pair, in 10 bytes each.
    """
    starts = torch.arange(0, seq, BLOCK, device=device)
    ends = (starts + BLOCK).clamp(max=seq) - 1
    diagonal = starts[:, None] == starts
    # Below the diagonal the nearest pair of a block is visible if any is, and the farthest if all are.
    some = pattern.visible(starts[:, None], ends) | diagonal
    every = pattern.visible(ends[:, None], starts) & ~diagonal
    # torch counts a block that ends beyond the sequence as partly visible.
    return some, every & (starts[:, None] + BLOCK <= seq)


def _create(some: Blocks, every: Blocks, mask_mod: Callable[..., Tensor], seq: int) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    partly, whole = _ordered((some & ~every)[:, None]), _ordered(every[:, None])
    return BlockMask.from_kv_blocks(*partly, *whole, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(seq, seq))


def _ordered(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Number of blocks in each row of blocks, and their indices, then those of the others."""
    marked = blocks.int()
    indices = marked.argsort(dim=-1, descending=True, stable=True)
    return marked.sum(dim=-1, dtype=torch.int32), indices.to(torch.int32)


def _uncompiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _kernel(device_type: str) -> Callable[..., Any]:
    # Uncompiled FlexAttention holds the whole score matrix; a CPU has only that.
    return compile_region(_uncompiled()) if device_type == "cuda" else _uncompiled()


def compile_region(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of uncompiled blocks as one operator, which activation checkpointing sees and can keep."""
    return torch.compile(function, options={"wrap_inductor_compiled_regions": True})
