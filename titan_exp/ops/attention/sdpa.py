"""Attention with an explicit kernel: torch's SDPA backends, FlashAttention 3 and 4, or FlexAttention.

Kernels with grouped-query support read shared keys and values without repeating them. Those without block masks compute
a window or chunks by tiles of query rows, each with the keys that one of its rows sees.
"""

from collections.abc import Collection
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_exp.config.machine.attention_backends import auto_backend
from titan_exp.ops.attention.flash_attention import activate
from titan_exp.ops.attention.flex import block_mask, flex_attention, pattern_mask
from titan_exp.ops.attention.mask_pattern import CAUSAL, MaskPattern, Tile
from titan_exp.ops.attention.max_logits import MaxLogits
from titan_exp.ops.attention.sinks import attention_with_sinks, math_attention_with_sinks

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
    head_dims: Collection[int],
    bf16: bool,
    documents: bool,
    masked: bool = False,
    parts: bool = False,
    deterministic: bool = False,
) -> AttentionBackend:
    """Choose the attention kernel, and activate FlashAttention 3 or 4 in this process if requested.

    `auto` is flash on CPU and `auto_backend` on CUDA, with cuDNN from Hopper on; the arguments are described there.

    Raises:
        UserError: the device or the installed packages cannot run the requested backend.
    """
    activate(requested, device)
    if requested != "auto":
        return requested  # type: ignore[return-value]  # checked by the configuration
    if device.type != "cuda":
        return "flash"
    chosen = auto_backend(
        head_dims, bf16=bf16, documents=documents, masked=masked, parts=parts, deterministic=deterministic
    )
    if chosen == "cudnn":
        hopper = torch.cuda.get_device_capability(device) >= (9, 0)
        chosen = "cudnn" if hopper and torch.backends.cudnn.is_available() else "flash"
    return chosen  # type: ignore[return-value]  # one of these


def document_mask(documents: Int[Tensor, "batch seq"]) -> Bool[Tensor, "batch 1 seq seq"]:
    """Causal mask within documents: True where a query (second to last dim) may see a key (last dim)."""
    seq = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    causal = torch.ones(seq, seq, dtype=torch.bool, device=documents.device).tril()
    return (same & causal)[:, None]


TileMask = tuple[tuple[Tile, ...], tuple[Tensor | None, ...]]
"""Mask of a pattern by tiles of query rows: tiles with a visible pair; and for each tile its visible pairs [batch_or_1,
1, rows, keys], or None if its kind says it.

No named tuple: of such an argument dynamo keeps the value in a reference cycle, and the first mask of a compiled graph
would stay allocated until the next garbage collection.
"""


def segment_ids(
    pattern: MaskPattern,
    documents: Int[Tensor, "batch seq"] | None,
    positions: Int[Tensor, "batch seq"] | None,
    index: Int[Tensor, " seq"] | None,
) -> tuple[Int[Tensor, "batch seq"] | None, MaskPattern]:
    """Ids equal for tokens that may see each other, and the pattern within them.

    `positions` are None if they are those of the sequence. Else they start again in documents, and so do chunks: a
    chunk is named by its first token's place in the sequence, from each token's place `index`.
    """
    if pattern.chunk is None or positions is None:
        return documents, pattern
    assert index is not None, "chunks of positions need the places of their tokens"
    starts = index - positions % pattern.chunk
    # A chunk lies in one document, unless documents start without their positions.
    ids = starts if documents is None else (documents << PLACE_BITS) + starts
    return ids, MaskPattern(window=pattern.reach)


PLACE_BITS = 40
"""Bits of a place in a sequence, below those of a document's number."""


class CausalAttention(nn.Module):
    """Attention core without linears, causal unless its pattern is full; a module, so that context parallelism can
    replace it."""

    def __init__(self, backend: AttentionBackend, scale: float | None = None, pattern: MaskPattern = CAUSAL) -> None:
        super().__init__()
        self.backend: AttentionBackend = backend
        self.scale = scale
        """Factor of the scores; None is 1 / sqrt(head_dim)."""
        self.pattern = pattern
        """Visible keys, beside documents. Layers of one pattern share their mask."""
        self.max_logits: MaxLogits | None = None
        """Tracks the largest logit of each head, for QK-Clip."""

    def mask(
        self,
        documents: Int[Tensor, "batch seq"] | None,
        positions: Int[Tensor, "batch seq"] | None = None,
        *,
        seq: int = 0,
        device: torch.device | None = None,
    ) -> Any:
        """Argument `mask` of `forward`, built once per forward pass of the model; None where kernels need none.

        `positions` are given if they start again within the sequence of `seq` tokens; `seq` and `device` are read
        without documents only.
        """
        if documents is not None:
            seq, device = documents.shape[1], documents.device
        pattern = self.pattern.within(seq)
        index = None if pattern.chunk is None or positions is None else torch.arange(seq, device=device)
        segments, pattern = segment_ids(pattern, documents, positions, index)
        if segments is None and pattern.is_unlimited and (self.backend != "flex" or not pattern.causal):
            return None
        assert pattern.causal, "documents are those of language models"
        if self.backend == "flex":
            return pattern_mask(pattern, seq, str(device)) if segments is None else block_mask(pattern, segments)
        if pattern.is_causal and segments is not None:
            return document_mask(segments)
        return _tile_mask(pattern, segments, seq, device)

    def forward(
        self,
        query: Float[Tensor, "batch heads seq head_dim"],
        key: Float[Tensor, "batch kv_heads seq head_dim"],
        value: Float[Tensor, "batch kv_heads seq v_dim"],
        mask: Any = None,
        sinks: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "batch heads seq v_dim"]:
        """Softmax(q·k · scale) · v over visible positions, in the dtype of `query`; v may be narrower than k.

        `sinks` are logits of the softmax beside the keys.
        """
        if self.backend == "flex":
            if mask is None and self.pattern.causal:
                mask = pattern_mask(CAUSAL, query.shape[2], str(query.device))
            return flex_attention(query, key, value, mask=mask, sinks=sinks, scale=self.scale)
        if not isinstance(mask, tuple):
            return self.attend(query, key, value, mask, causal=mask is None and self.pattern.causal, sinks=sinks)
        parts = [
            self.attend(
                query[:, :, tile.rows],
                key[:, :, tile.keys],
                value[:, :, tile.keys],
                visible,
                causal=tile.kind == "causal" and visible is None,
                sinks=sinks,
            )
            for tile, visible in zip(*mask, strict=True)
        ]
        return torch.cat([part.transpose(1, 2) for part in parts], dim=1).transpose(1, 2)

    def attend(
        self,
        query: Float[Tensor, "batch heads rows head_dim"],
        key: Float[Tensor, "batch kv_heads keys head_dim"],
        value: Float[Tensor, "batch kv_heads keys v_dim"],
        visible: Bool[Tensor, "batch_or_1 1 rows keys"] | None,
        *,
        causal: bool,
        sinks: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "batch heads rows v_dim"]:
        """Attention to these keys by a kernel of SDPA, or one that returns the log-sum-exp for sinks."""
        grouped, width = query.shape[1] != key.shape[1], value.shape[-1]
        if self.max_logits is not None:
            scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
            self.max_logits(query, key, visible, causal=causal, scale=scale)
        if sinks is not None:
            how = {"sinks": sinks, "visible": visible, "causal": causal, "scale": self.scale}
            if self.backend == "math":
                return math_attention_with_sinks(query, key, value, **how)
            kernel = "cpu" if query.device.type == "cpu" else self.backend
            return attention_with_sinks(query, key, value, **how, backend=kernel)  # type: ignore[arg-type]  # checked by the rules
        if grouped and self.backend == "efficient":
            # This kernel has no grouped-query support.
            times = query.shape[1] // key.shape[1]
            key, value, grouped = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), False
        if self.backend in ONE_WIDTH and width < key.shape[-1]:
            value = F.pad(value, (0, key.shape[-1] - width))
        # cuDNN takes no single key, as of an empty prompt.
        kernel = "math" if self.backend == "cudnn" and key.shape[2] == 1 else self.backend
        with sdpa_kernel(SDPA_BACKENDS[kernel]):
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, is_causal=causal, scale=self.scale, enable_gqa=grouped
            )
        # Kernels lay out rows of all heads together, and copy a gradient that is not.
        return out if out.shape[-1] == width else out.transpose(1, 2)[..., :width].transpose(1, 2)


def _tile_mask(
    pattern: MaskPattern, segments: Int[Tensor, "batch seq"] | None, seq: int, device: torch.device | None
) -> TileMask:
    tiles, index = tuple(pattern.tiles(range(seq), range(seq))), torch.arange(seq, device=device)
    visible: list[Tensor | None] = []
    for tile in tiles:
        if segments is None and tile.kind != "masked":
            visible.append(None)
            continue
        seen = pattern.visible(index[tile.rows, None], index[None, tile.keys])[None]
        if segments is not None:
            seen = seen & (segments[:, tile.rows, None] == segments[:, None, tile.keys])
        visible.append(seen[:, None])
    return tiles, tuple(visible)
