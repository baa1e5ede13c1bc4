"""Window, chunks, documents and sinks against the whole score matrix in fp64: outputs and gradients."""

import itertools
from typing import Any

import pytest
import torch

from tests.ops.test_sdpa import ON_CUDA
from titan_exp.ops.attention.mask_pattern import FULL, MaskPattern, Tile
from titan_exp.ops.attention.sdpa import CausalAttention

# On CPU there is only the uncompiled FlexAttention, and torch says that it is slow.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

SEQ = 40
PATTERNS = [MaskPattern(), MaskPattern(7), MaskPattern(1), MaskPattern(chunk=8), MaskPattern(5, 12), MaskPattern(99)]
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 30, [0] * 3 + [1] * 20 + [2] * 17])
RESTARTED = torch.cat([torch.cat([torch.arange(n) for n in rows])[None] for rows in ((10, 30), (3, 20, 17))])


def visible(
    pattern: MaskPattern, documents: torch.Tensor | None, positions: torch.Tensor | None, seq: int = SEQ
) -> torch.Tensor:
    """The definition: causal, window by place, chunk by position, documents."""
    index = torch.arange(seq)
    found = (index[:, None] >= index).expand(2, seq, seq)
    if pattern.window is not None:
        found = found & (index > index[:, None] - pattern.window)
    if pattern.chunk is not None:
        chunk = (index.expand(2, -1) if positions is None else positions) // pattern.chunk
        found = found & (chunk[:, :, None] == chunk[:, None, :])
    if documents is not None:
        found = found & (documents[:, :, None] == documents[:, None, :])
    return found[:, None]


def reference(query: Any, key: Any, value: Any, seen: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the visible keys and the sink, whose weight is dropped."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    weights = (query @ key.mT * query.shape[-1] ** -0.5).exp() * seen
    beside = 0.0 if sinks is None else sinks.exp()[:, None, None]
    return weights @ value / (weights.sum(-1, keepdim=True) + beside)


def leaves(kv_heads: int = 2) -> list[torch.Tensor]:
    """Query, key, value and sinks in fp64."""
    torch.manual_seed(0)
    shapes = [(2, 4, SEQ, 16), (2, kv_heads, SEQ, 16), (2, kv_heads, SEQ, 16), (4,)]
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("backend", ["flash", "math", "flex"])
def test_full_attention_sees_every_key(backend):
    """Later keys too, by kernels without a mask."""
    *heads, _ = leaves()
    core = CausalAttention(backend, pattern=FULL)
    mask = core.mask(None, seq=SEQ, device=torch.device("cpu"))
    assert mask is None
    every = torch.ones(2, 1, SEQ, SEQ, dtype=torch.bool)
    expected = reference(heads[0], heads[1], heads[2], every, None)
    if backend == "flex":  # no gradients on CPU, and no fp64
        found = core(*(tensor.detach().float() for tensor in heads), mask)
        torch.testing.assert_close(found, expected.detach().float(), atol=2e-6, rtol=1e-5)
        return
    found, gradient = core(*heads, mask), torch.randn_like(expected)
    torch.testing.assert_close(found, expected)
    for own, other in zip(*(torch.autograd.grad(out, heads, gradient) for out in (found, expected)), strict=True):
        torch.testing.assert_close(own, other)


def test_a_full_pattern_counts_every_key_and_needs_no_mask():
    assert FULL.visible_per_query(SEQ) == SEQ
    assert FULL.within(SEQ) == FULL
    assert (FULL.is_causal, FULL.is_unlimited) == (False, True)
    index = torch.arange(SEQ)
    assert FULL.visible(index[:, None], index).all()
    with pytest.raises(AssertionError, match="only causal patterns"):
        MaskPattern(7, causal=False)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("packed", ["no", "documents", "positions"])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("backend", ["flash", "math", "flex"])
def test_attention_is_softmax_over_visible_keys(backend, pattern: MaskPattern, packed: str, with_sinks: bool):
    documents, positions = (None if packed == "no" else DOCUMENTS), (RESTARTED if packed == "positions" else None)
    *heads, sinks = leaves()
    inputs: list[Any] = [*heads, sinks] if with_sinks else heads
    core = CausalAttention(backend, pattern=pattern)
    mask = core.mask(documents, positions, seq=SEQ, device=torch.device("cpu"))
    if backend == "flex":  # no gradients on CPU, and no fp64
        inputs = [tensor.detach().float() for tensor in inputs]
        found = core(*inputs[:3], mask, *inputs[3:])
        exact = [tensor.double() for tensor in inputs]
        seen, beside = visible(pattern, documents, positions), exact[3] if with_sinks else None
        expected = reference(exact[0], exact[1], exact[2], seen, beside)
        torch.testing.assert_close(found, expected.float(), atol=2e-6, rtol=1e-5)
        return
    found = core(*inputs[:3], mask, *inputs[3:])
    seen = visible(pattern, documents, positions)
    expected = reference(heads[0], heads[1], heads[2], seen, sinks if with_sinks else None)
    gradient = torch.randn_like(expected)
    mine = (found, *torch.autograd.grad(found, inputs, gradient))
    theirs = (expected, *torch.autograd.grad(expected, inputs, gradient))
    for ours, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, other, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "flash"),
        *(pytest.param("cuda", backend, marks=ON_CUDA) for backend in ("flex", "efficient", "math")),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pattern", [MaskPattern(50), MaskPattern(chunk=64)], ids=str)
def test_passes_with_sinks_agree_with_the_reference(device: str, backend: Any, pattern: MaskPattern, packed: bool):
    """Forward and backward in bf16 on a GPU; 192 tokens are not a multiple of a block of 128."""
    torch.manual_seed(0)
    dtype, close = (torch.float32, 2e-5) if device == "cpu" else (torch.bfloat16, 3e-2)
    shapes = [(2, 4, 192, 64), (2, 2, 192, 64), (2, 2, 192, 64), (4,)]
    inputs = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    documents = torch.arange(192) // torch.tensor([[50], [77]]) if packed else None
    core = CausalAttention(backend, pattern=pattern)
    mask = core.mask(None if documents is None else documents.to(device), seq=192, device=torch.device(device))
    found = core(inputs[0], inputs[1], inputs[2], mask, inputs[3])
    whole = [tensor.detach().cpu().double().requires_grad_() for tensor in inputs]
    expected = reference(whole[0], whole[1], whole[2], visible(pattern, documents, None, 192), whole[3])
    gradient = torch.randn_like(found)
    mine = (found, *torch.autograd.grad(found, inputs, gradient))
    theirs = (expected, *torch.autograd.grad(expected, whole, gradient.cpu().double()))
    for our, other in zip(mine, theirs, strict=True):
        assert (our.detach().cpu().double() - other.detach()).norm() < close * other.detach().norm()


def test_sinks_in_fp32_and_bf16_are_near():
    *heads, sinks = leaves()
    expected = reference(heads[0], heads[1], heads[2], visible(MaskPattern(7), None, None), sinks)
    for dtype, close in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        core = CausalAttention("flash", pattern=MaskPattern(7))
        mask = core.mask(None, seq=SEQ, device=torch.device("cpu"))
        found = core(*(tensor.to(dtype) for tensor in heads), mask, sinks.to(dtype))
        assert (found.double() - expected).norm() < close * expected.norm()


def test_a_sequence_within_the_limits_is_causal():
    core = CausalAttention("flash", pattern=MaskPattern(SEQ, SEQ))
    assert core.mask(None, seq=SEQ, device=torch.device("cpu")) is None
    mask = core.mask(None, seq=SEQ + 1, device=torch.device("cpu"))
    assert type(mask) is tuple, "dynamo keeps the first value of a named tuple"
    assert len(mask[0]) > 1


@pytest.mark.parametrize(("window", "chunk"), [*itertools.product((None, 1, 3, 13), (None, 1, 4, 12))])
def test_tiles_cover_visible_pairs_once(window: int | None, chunk: int | None):
    pattern = MaskPattern(window, chunk)
    for first, other, length in itertools.product((0, 8, 17), (0, 5, 8, 24), (8, 32)):
        queries, keys = range(first, first + length), range(other, other + length)
        pairs = [
            (row, column)
            for tile in pattern.tiles(queries, keys)
            for row, column in itertools.product(
                range(tile.first_row, tile.end_row), range(tile.first_key, tile.end_key)
            )
            if _sees(tile, row, column, pattern.visible(queries[row], keys[column]))
        ]
        wanted = {
            (row, column)
            for row, column in itertools.product(range(length), repeat=2)
            if pattern.visible(queries[row], keys[column])
        }
        assert len(pairs) == len(set(pairs))
        assert set(pairs) == wanted
    for queries in (range(29), range(8, 17)):
        wanted = sum(pattern.visible(query, key) for query in queries for key in range(29))
        assert pattern.visible_keys(queries) == wanted


def _sees(tile: Tile, row: int, column: int, is_visible: bool) -> bool:
    """True if the kernel of a tile computes this pair."""
    if tile.kind == "causal":
        return column - tile.first_key <= row - tile.first_row
    return tile.kind == "whole" or is_visible


@pytest.mark.parametrize("pattern", [MaskPattern(128), MaskPattern(chunk=512)], ids=str)
def test_hidden_keys_are_hardly_computed(pattern: MaskPattern):
    seq = 4096
    computed = sum(
        (tile.end_row - tile.first_row) * (tile.end_key - tile.first_key) / (2 if tile.kind == "causal" else 1)
        for tile in pattern.tiles(range(seq), range(seq))
    )
    assert computed < seq * seq / 2 / 3
