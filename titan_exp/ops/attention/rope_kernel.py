"""Triton kernel of `ops.attention.rope`, in a separate file because importing it needs Triton."""

import triton
import triton.language as tl

from titan_exp.ops.rounding import rounded


@triton.jit
def split_rotated_kernel(  # noqa: PLR0917  # Triton kernels have no keyword-only arguments
    qkv: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    kv_heads: tl.tensor,
    group: tl.constexpr,
    half: tl.constexpr,
    padded: tl.constexpr,
    heads: tl.constexpr,
    backward: tl.constexpr,
) -> None:
    """Rotate and split `heads` heads of a token of the fused projection, or turn back and join their gradients.

    `positions` is the number of rows of cosines and sines, of one sequence or of all. `padded` is a power of two that
    is at least `half`, the number of a head's pairs.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)[:, None]
    pair = tl.arange(0, padded)[None, :]
    inside = (head < kv_heads * (group + 2)) & (pair < half)
    fused = qkv + token * kv_heads * (group + 2) * (2 * half) + (head * (2 * half) + pair)
    # Per key-value head: its query heads, its key, its value.
    kv_head = head // (group + 2)
    slot = head - kv_head * (group + 2)
    first_kv = token * kv_heads * (2 * half)
    of_query = query + first_kv * group + ((kv_head * group + slot) * (2 * half) + pair)
    of_key, of_value = key + first_kv + (kv_head * (2 * half) + pair), value + first_kv + (kv_head * (2 * half) + pair)
    part = tl.where(slot < group, of_query, tl.where(slot == group, of_key, of_value))
    if backward:
        source, target = part, fused
    else:
        source, target = fused, part
    first, second = tl.load(source, mask=inside, other=0.0), tl.load(source + half, mask=inside, other=0.0)
    angle = (tl.program_id(0) % positions).to(tl.int64) * half + pair
    cosine = tl.load(cos + angle, mask=pair < half, other=0.0)
    sine = tl.load(sin + angle, mask=pair < half, other=0.0)
    if backward:
        sine = -sine
    x, y = first.to(tl.float32), second.to(tl.float32)
    turned = rounded(x * cosine - y * sine, first.dtype), rounded(y * cosine + x * sine, first.dtype)
    tl.store(target, tl.where(slot > group, first, turned[0]), mask=inside)
    tl.store(target + half, tl.where(slot > group, second, turned[1]), mask=inside)
