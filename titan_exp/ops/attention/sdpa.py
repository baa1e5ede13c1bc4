"""Causal attention with an explicit kernel: torch's SDPA backends, FlashAttention 3 and 4, or FlexAttention.

Kernels with grouped-query support read shared keys and values without repeating them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_exp.config.machine.attention_backends import CUDNN_EVERYWHERE, HEAD_SIZES
from titan_exp.ops.attention.flash_attention import activate

AttentionBackend = Literal["cudnn", "flash", "fa3", "fa4", "efficient", "math", "flex"]

SDPA_BACKENDS: dict[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "fa3": SDPBackend.FLASH_ATTENTION,
    "fa4": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

ONE_WIDTH = ("flash", "fa3", "fa4")
"""Kernels that take values as wide as keys only: narrower ones are padded with zeros."""


def choose_backend(
    requested: str,
    device: torch.device,
    *,
    head_dim: int,
    bf16: bool,
    documents: bool,
    parts: bool = False,
    deterministic: bool = False,
) -> AttentionBackend:
    """Choose the attention kernel, and activate FlashAttention 3 or 4 in this process if requested.

    `auto` is flash on CPU. On CUDA it is efficient for fp32, document masks and heads wider than 256; else cuDNN from
    Hopper on, and flash on older GPUs. `parts` says that attention is merged by LSE, which excludes cuDNN; so does
    `deterministic`, since torch refuses it for its backward pass.

    Raises:
        UserError: the device or the installed packages cannot run the requested backend.
    """
    activate(requested, device)
    if requested != "auto":
        return requested  # type: ignore[return-value]  # checked by the configuration
    if device.type != "cuda":
        return "flash"
    if documents or not bf16 or not HEAD_SIZES["flash"].takes(head_dim):
        return "efficient"
    if parts or deterministic or not CUDNN_EVERYWHERE.takes(head_dim):
        return "flash"
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    return "cudnn" if hopper and torch.backends.cudnn.is_available() else "flash"


def document_mask(documents: Int[Tensor, "batch seq"]) -> Bool[Tensor, "batch 1 seq seq"]:
    """Causal mask within documents: True where a query (second to last dim) may see a key (last dim)."""
    seq = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    causal = torch.ones(seq, seq, dtype=torch.bool, device=documents.device).tril()
    return (same & causal)[:, None]


class CausalAttention(nn.Module):
    """Attention core without linears; a module, so that context parallelism can replace it."""

    def __init__(self, backend: AttentionBackend, scale: float | None = None) -> None:
        super().__init__()
        self.backend: AttentionBackend = backend
        self.scale = scale
        """Factor of the scores; None is 1 / sqrt(head_dim)."""

    def mask(self, documents: Int[Tensor, "batch seq"] | None) -> Any:
        """Argument `mask` of `forward`, built once per forward pass of the model; None for causal attention."""
        if documents is None:
            return None
        if self.backend == "flex":
            return _flex_block_mask(documents)
        return document_mask(documents)

    def forward(
        self,
        query: Float[Tensor, "batch heads seq head_dim"],
        key: Float[Tensor, "batch kv_heads seq head_dim"],
        value: Float[Tensor, "batch kv_heads seq v_dim"],
        mask: Any = None,
    ) -> Float[Tensor, "batch heads seq v_dim"]:
        """Softmax(q·k · scale) · v over earlier positions, in the dtype of `query`; v may be narrower than k."""
        grouped, width = query.shape[1] != key.shape[1], value.shape[-1]
        if self.backend == "flex":
            mask = mask if mask is not None else _flex_causal_mask(query.shape[2], str(query.device))
            kernel = _flex_kernel(query.device.type)
            return kernel(query, key, value, block_mask=mask, scale=self.scale, enable_gqa=grouped)
        if grouped and self.backend == "efficient":
            # This kernel has no grouped-query support.
            times = query.shape[1] // key.shape[1]
            key, value, grouped = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), False
        if self.backend in ONE_WIDTH and width < key.shape[-1]:
            value = F.pad(value, (0, key.shape[-1] - width))
        with sdpa_kernel(SDPA_BACKENDS[self.backend]):
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
            )
        return out[..., :width]


@cache
def _flex_kernel(device_type: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled FlexAttention holds the whole score matrix; a CPU has only that.
    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention  # type: ignore[return-value]


@cache
def _flex_causal_mask(seq: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, q, k: q >= k, None, None, seq, seq, device=device)


def _flex_block_mask(documents: Int[Tensor, "batch seq"]) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    # FlexAttention reads the signature of the function: no annotations.
    batch, seq = documents.shape
    return create_block_mask(
        lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k]),
        batch,
        None,
        seq,
        seq,
        device=str(documents.device),
    )
