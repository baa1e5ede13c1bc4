"""Causal attention with the kernel chosen explicitly: torch's SDPA backends, FlashAttention 3 and 4, or FlexAttention.

Grouped-query attention runs on the shared keys and values as they are, where the kernel can.
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


def choose_backend(
    requested: str, device: torch.device, *, head_dim: int, bf16: bool, documents: bool, parts: bool = False
) -> AttentionBackend:
    """Name the kernel that will run; where it takes the place of torch's own in the process, it does so now.

    Args:
        requested: a backend's name, or `auto` for the fastest that torch brings along for this device: on CUDA cuDNN
            from Hopper on and flash before, efficient in fp32, where documents are masked and for heads wider than 256
            (the others take none of them); flash on CPU.
        device: where attention will run.
        head_dim: width of a head.
        bf16: whether it will run in bf16, else fp32.
        documents: whether a document mask will be given.
        parts: whether it will attend to parts of the keys and merge them (`ops.partial_attention`); cuDNN is not used
            for that.

    Raises:
        UserError: the device, or what is installed, cannot run the one that was asked for.
    """
    activate(requested, device)
    if requested != "auto":
        return requested  # type: ignore[return-value]  # one of Backend, checked by the configuration
    if device.type != "cuda":
        return "flash"
    if documents or not bf16 or not HEAD_SIZES["flash"].takes(head_dim):
        return "efficient"
    if parts or not CUDNN_EVERYWHERE.takes(head_dim):
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
    """The attention core, without projections; a module of its own so that context parallelism can replace it."""

    def __init__(self, backend: AttentionBackend) -> None:
        super().__init__()
        self.backend: AttentionBackend = backend

    def mask(self, documents: Int[Tensor, "batch seq"] | None) -> Any:
        """Argument `mask` of `forward`, made once per forward pass of the model; None is causal."""
        if documents is None:
            return None
        if self.backend == "flex":
            return _flex_block_mask(documents)
        return document_mask(documents)

    def forward(
        self,
        query: Float[Tensor, "batch heads seq head_dim"],
        key: Float[Tensor, "batch kv_heads seq head_dim"],
        value: Float[Tensor, "batch kv_heads seq head_dim"],
        mask: Any = None,
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """Softmax(q·k / sqrt(head_dim)) · v over earlier positions, in the type of `query`."""
        grouped = query.shape[1] != key.shape[1]
        if self.backend == "flex":
            mask = mask if mask is not None else _flex_causal_mask(query.shape[2], str(query.device))
            return _flex_kernel(query.device.type)(query, key, value, block_mask=mask, enable_gqa=grouped)
        if grouped and self.backend == "efficient":
            # The one kernel that takes no groups.
            times = query.shape[1] // key.shape[1]
            key, value, grouped = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), False
        with sdpa_kernel(SDPA_BACKENDS[self.backend]):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
            )


@cache
def _flex_kernel(device_type: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled FlexAttention holds the whole score matrix; on CPU only that form is there.
    return torch.compile(flex_attention) if device_type == "cuda" else flex_attention  # type: ignore[return-value]


@cache
def _flex_causal_mask(seq: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, q, k: q >= k, None, None, seq, seq, device=device)


def _flex_block_mask(documents: Int[Tensor, "batch seq"]) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    # No annotations here: FlexAttention reads the function's signature.
    batch, seq = documents.shape
    return create_block_mask(
        lambda b, h, q, k: (q >= k) & (documents[b, q] == documents[b, k]),
        batch,
        None,
        seq,
        seq,
        device=str(documents.device),
    )
