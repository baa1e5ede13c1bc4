"""Attention with an explicit kernel: torch's SDPA backends, FlashAttention 3 and 4, or FlexAttention.

Kernels with grouped-query support read shared keys and values without repeating them. Kernels without block masks
compute a window or chunks by tiles of query rows, each with only the keys that some row sees.
"""

from collections.abc import Callable, Collection
from functools import cache
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from titan_exp.config.errors.user_error import UserError, Violation
from titan_exp.config.torch_features import ATTENTION_BACKEND, FLASH_PACKAGES, auto_backend
from titan_exp.ops.attention.attention_with_lse import MaxLogits, attention_with_sinks, math_attention_with_sinks
from titan_exp.ops.attention.mask_pattern import CAUSAL, MaskPattern, Tile

Ids = Int[Tensor, "batch seq"]

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
"""Kernels whose values must be as wide as keys; narrower values are padded with zeros."""

BLOCK = 128  # rows and columns of a block of FlexAttention's score matrix
Blocks = Bool[Tensor, "*batch blocks blocks"]


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
    """Choose the attention kernel, and activate FlashAttention 3 or 4 in this process if requested. `auto` means flash
    on a CPU and `auto_backend` on CUDA (cuDNN from Hopper on), which describes the arguments. Raises UserError if the
    device or the installed packages cannot run the requested backend."""
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


def runs_here(backend: str, device: torch.device) -> bool:
    """True if the package of a backend is installed and runs on this device; True for every other backend."""
    package = FLASH_PACKAGES.get(backend)
    if package is None:
        return True
    fits = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in package.majors
    return fits and package.is_installed()


def activate(backend: str, device: torch.device) -> None:
    """Make a package's kernel torch's flash kernel; restore torch's own if `backend` names no package. Raises UserError
    if the package does not run on this device, or cannot be imported."""
    package = FLASH_PACKAGES.get(backend)
    if package is None:
        if current_flash_attention_impl() is not None:
            restore_flash_attention_impl()
        return
    if device.type != "cuda":
        raise _refused(backend, f"{package.title} needs a GPU, and this run uses a {device.type.upper()}")
    major, minor = torch.cuda.get_device_capability(device)
    if major not in package.majors:
        name = torch.cuda.get_device_name(device)
        supported = " or ".join(f"{number}.0" for number in package.majors)
        raise _refused(backend, f"{package.title} needs CUDA capability {supported}, and {name} has {major}.{minor}")
    try:
        activate_flash_attention_impl(package.implementation)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        # The installed package may be built for another torch or CUDA.
        raise _refused(backend, f"{package.title} does not load here: {error}") from error


def _refused(backend: str, reason: str) -> UserError:
    remedy = f"use {ATTENTION_BACKEND}=auto"
    return UserError("This run cannot start.", [Violation(ATTENTION_BACKEND, backend, reason, remedy)])


def document_mask(documents: Ids) -> Bool[Tensor, "batch 1 seq seq"]:
    """Causal mask within documents: True where a query (second to last dim) may see a key (last dim)."""
    seq = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    causal = torch.ones(seq, seq, dtype=torch.bool, device=documents.device).tril()
    return (same & causal)[:, None]


TileMask = tuple[tuple[Tile, ...], tuple[Tensor | None, ...]]
"""Mask of a pattern by tiles of query rows: the tiles that have a visible pair, and for each its visible pairs
[batch_or_1, 1, rows, keys], or None if its kind implies them.

It is not a named tuple: dynamo would keep such an argument's value in a reference cycle, and the first mask of a
compiled graph would stay allocated until the next garbage collection.
"""


def segment_ids(
    pattern: MaskPattern, documents: Ids | None, positions: Ids | None, index: Int[Tensor, " seq"] | None
) -> tuple[Ids | None, MaskPattern]:
    """Ids that are equal for tokens that may see each other, and the pattern among such tokens. `positions` are None if
    they count through the sequence. Otherwise they restart in documents, and so do chunks: a chunk's id is its first
    token's place in the sequence, computed from each token's place `index`."""
    if pattern.chunk is None or positions is None:
        return documents, pattern
    assert index is not None, "chunks of positions need the places of their tokens"
    starts = index - positions % pattern.chunk
    # A chunk lies in one document, unless documents start without their positions.
    ids = starts if documents is None else (documents << PLACE_BITS) + starts
    return ids, MaskPattern(window=pattern.reach)


PLACE_BITS = 40  # number of bits for a place in a sequence, below the bits of a document's number


class CausalAttention(nn.Module):
    """Attention core without linears, causal unless its pattern is full. It is a module, so that context parallelism
    can replace it."""

    def __init__(self, backend: AttentionBackend, scale: float | None = None, pattern: MaskPattern = CAUSAL) -> None:
        super().__init__()
        self.backend: AttentionBackend = backend
        self.scale = scale
        """Factor of the scores; None means 1 / sqrt(head_dim)."""
        self.pattern = pattern
        """Mask pattern: the visible keys, documents aside. Layers of one pattern share their mask."""
        self.max_logits: MaxLogits | None = None
        """Tracks the largest logit of each head, for QK-Clip."""

    def mask(
        self, documents: Ids | None, positions: Ids | None = None, *, seq: int = 0, device: torch.device | None = None
    ) -> Any:
        """Build the argument `mask` of `forward`, once per forward pass of the model; None if kernels need none.
        `positions` are given if they restart within the sequence of `seq` tokens; `seq` and `device` are only used
        without documents."""
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
        tiles, places = tuple(pattern.tiles(range(seq), range(seq))), torch.arange(seq, device=device)
        seen: list[Tensor | None] = [None] * len(tiles)
        for number, tile in enumerate(tiles):
            if segments is not None or tile.kind == "masked":
                pairs = pattern.visible(places[tile.rows, None], places[None, tile.keys])[None]
                if segments is not None:
                    pairs = pairs & (segments[:, tile.rows, None] == segments[:, None, tile.keys])
                seen[number] = pairs[:, None]
        return tiles, tuple(seen)

    def forward(
        self,
        query: Float[Tensor, "batch heads seq head_dim"],
        key: Float[Tensor, "batch kv_heads seq head_dim"],
        value: Float[Tensor, "batch kv_heads seq v_dim"],
        mask: Any = None,
        sinks: Float[Tensor, " heads"] | None = None,
    ) -> Float[Tensor, "batch heads seq v_dim"]:
        """Compute softmax(q·k · scale) · v over visible positions, in the dtype of `query`; v may be narrower than k.
        `sinks` are further logits of the softmax, beside the keys."""
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
        """Attend to these keys by a kernel of SDPA; with sinks, by a kernel that returns the log-sum-exp."""
        grouped, width = query.shape[1] != key.shape[1], value.shape[-1]
        if self.max_logits is not None:
            scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
            self.max_logits(query, key, visible, causal=causal, scale=scale)
        if sinks is not None:
            how = {"sinks": sinks, "visible": visible, "causal": causal, "scale": self.scale}
            if self.backend == "math":
                return math_attention_with_sinks(query, key, value, **how)
            kernel = "cpu" if query.device.type == "cpu" else self.backend
            return attention_with_sinks(query, key, value, **how, backend=kernel)  # checked by the rules  # type: ignore[arg-type]  # checked by the rules
        if grouped and self.backend == "efficient":
            # This kernel has no grouped-query support.
            times = query.shape[1] // key.shape[1]
            key, value, grouped = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), False
        if self.backend in ONE_WIDTH and width < key.shape[-1]:
            value = nn.functional.pad(value, (0, key.shape[-1] - width))
        # cuDNN refuses a single key, such as an empty prompt's.
        kernel = "math" if self.backend == "cudnn" and key.shape[2] == 1 else self.backend
        with sdpa_kernel(SDPA_BACKENDS[kernel]):
            out = nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, is_causal=causal, scale=self.scale, enable_gqa=grouped
            )
        # Kernels lay out rows of all heads together, and copy a gradient that is laid out otherwise.
        return out if out.shape[-1] == width else out.transpose(1, 2)[..., :width].transpose(1, 2)


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Any, sinks: Tensor | None, scale: float | None
) -> Tensor:
    """FlexAttention under a block mask, in the dtype of `query`; arguments are as in `CausalAttention.forward`."""
    # When a whole block is compiled, no cache is read.
    kernel = _uncompiled() if torch.compiler.is_compiling() else _kernel(query.device.type)
    how = {"block_mask": mask, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if sinks is None:
        return kernel(query, key, value, **how)
    from torch.nn.attention.flex_attention import AuxRequest

    out, found = kernel(query, key, value, **how, return_aux=AuxRequest(lse=True))
    return (out * torch.sigmoid(found.lse - sinks.to(found.lse.dtype)[:, None])[..., None]).to(query.dtype)


def block_mask(pattern: MaskPattern, segments: Ids) -> Any:
    """Block mask of a causal pattern within segments."""
    seq, visible = segments.shape[1], _visible(pattern, segments.shape[1])
    some, every = _visible_blocks(pattern, seq, segments.device)
    padded = torch.arange(-(-seq // BLOCK) * BLOCK, device=segments.device).clamp(max=seq - 1)
    low, high = segments[:, padded].unflatten(1, (-1, BLOCK)).aminmax(dim=-1)
    # Ascending segments, such as documents, are in both blocks or in neither; for others, too many blocks are computed.
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
    """Blocks of the score matrix with some visible pair, and blocks in which every pair is visible. torch's
    `create_block_mask` would look at every pair, with 10 bytes each."""
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
    """Number of blocks in each row of blocks, and the indices of these blocks, followed by those of the others."""
    marked = blocks.int()
    indices = marked.argsort(dim=-1, descending=True, stable=True)
    return marked.sum(dim=-1, dtype=torch.int32), indices.to(torch.int32)


def _uncompiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _kernel(device_type: str) -> Callable[..., Any]:
    # Uncompiled FlexAttention holds the whole score matrix, and a CPU has no other.
    if device_type != "cuda":
        return _uncompiled()
    # In uncompiled blocks it is one operator, which activation checkpointing sees and can keep.
    return torch.compile(_uncompiled(), options={"wrap_inductor_compiled_regions": True})
