"""FlexAttention (He et al. 2024): block masks of a pattern and of segments, compiled kernels, sinks."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from titan_exp.ops.attention.mask_pattern import MaskPattern


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Any, sinks: Tensor | None, scale: float | None
) -> Tensor:
    """Attention under a block mask, in the dtype of `query`; arguments as of `CausalAttention.forward`."""
    kernel = _kernel(query.device.type)
    how = {"block_mask": mask, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if sinks is None:
        return kernel(query, key, value, **how)
    from torch.nn.attention.flex_attention import AuxRequest

    out, found = kernel(query, key, value, **how, return_aux=AuxRequest(lse=True))
    return (out * torch.sigmoid(found.lse - sinks.to(found.lse.dtype)[:, None])[..., None]).to(query.dtype)


def block_mask(pattern: MaskPattern, segments: Int[Tensor, "batch seq"]) -> Any:
    """Block mask of a pattern within segments."""
    (batch, seq), visible = segments.shape, _visible(pattern, segments.shape[1])
    return _create(lambda b, h, q, k: visible(q, k) & (segments[b, q] == segments[b, k]), batch, seq, segments.device)


@cache
def pattern_mask(pattern: MaskPattern, seq: int, device: str) -> Any:
    """Block mask of a pattern."""
    visible = _visible(pattern, seq)
    return _create(lambda b, h, q, k: visible(q, k), None, seq, device)


def _visible(pattern: MaskPattern, seq: int) -> Callable[[Tensor, Tensor], Tensor]:
    """`pattern.visible` as one expression, which FlexAttention compiles."""
    window, chunk = pattern.window or seq, pattern.chunk or seq
    if pattern.is_causal:
        return lambda q, k: q >= k
    return lambda q, k: (q >= k) & (q - k < window) & (q // chunk == k // chunk)


def _create(mask_mod: Callable[..., Tensor], batch: int | None, seq: int, device: torch.device | str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask_mod, batch, None, seq, seq, device=str(device))


@cache
def _kernel(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled FlexAttention holds the whole score matrix; a CPU has only that.
    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention
