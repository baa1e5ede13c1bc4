"""Row ranges of fused and permuted weights: qkv, gate and up, and rotated features of query and key heads."""

from collections.abc import Iterator

from titan_exp.models.convert.state_dict_map import RowRange
from titan_exp.models.spec.model_spec import AttentionSpec
from titan_exp.models.spec.swiglu import FFN_GROUP


def qkv_rows(attention: AttentionSpec, query: str, key: str, value: str, interleaved: bool) -> Iterator[RowRange]:
    """Rows of the fused weight, by key-value head: its query heads, its key, its value."""
    width, group = attention.qk_dim, attention.group
    start = 0
    for head in range(attention.kv_heads):
        rotated = [(query, head * group + member) for member in range(group)] + [(key, head)]
        for name, theirs in rotated:
            if interleaved:
                yield from half_split_rows(start, width, name, theirs * width)
            else:
                yield RowRange(start, width, name, theirs * width)
            start += width
        yield RowRange(start, attention.v_dim, value, head * attention.v_dim)
        start += attention.v_dim


def gate_up_rows(channels: int, gate: str, up: str, *, up_first: int = 0, step: int = 1) -> Iterator[RowRange]:
    """Rows of the fused weight, which alternate in groups (see `ops.swiglu`).

    Their up rows begin at `up_first`, and `step` is the stride of both.
    """
    for group in range(channels // FFN_GROUP):
        first, theirs = 2 * group * FFN_GROUP, group * FFN_GROUP * step
        yield RowRange(first, FFN_GROUP, gate, theirs, step)
        yield RowRange(first + FFN_GROUP, FFN_GROUP, up, up_first + theirs, step)


def rotated_tail_rows(heads: int, width: int, rotated: int, name: str) -> Iterator[RowRange]:
    """Rows of heads whose last `rotated` features their RoPE rotates as pairs (2i, 2i + 1)."""
    for start in range(0, heads * width, width):
        if width > rotated:
            yield RowRange(start, width - rotated, name, start)
        yield from half_split_rows(start + width - rotated, rotated, name, start + width - rotated)


def half_split_rows(start: int, width: int, name: str, first: int) -> Iterator[RowRange]:
    """Rows of pairs (i, i + width / 2), from neighbours (2i, 2i + 1) of theirs."""
    half = width // 2
    yield RowRange(start, half, name, first, step=2)
    yield RowRange(start + half, half, name, first + 1, step=2)
