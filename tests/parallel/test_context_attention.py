"""Tiles of context-parallel attention: what they show is the whole mask, with windows, chunks and documents."""

import pytest
import torch

from titan_exp.ops.attention.mask_pattern import CAUSAL, MaskPattern
from titan_exp.parallel.context_parallel.attention import _bias, _places, _tiles
from titan_exp.parallel.context_parallel.load_balance import head_tail_pieces

SEQ = 48


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("pattern", [CAUSAL, MaskPattern(5), MaskPattern(40), MaskPattern(chunk=32)], ids=str)
def test_tiles_show_what_the_whole_mask_shows(pattern: MaskPattern, packed: bool, degree: int):
    places, kinds = torch.arange(SEQ), set[str]()
    documents = torch.stack([(places >= 11).long() + (places >= 30), (places >= 7).long()])
    whole = pattern.visible(places[:, None], places).expand(2, SEQ, SEQ)
    whole = whole & (documents[:, :, None] == documents[:, None]) if packed else whole
    for own in (head_tail_pieces(rank, degree, SEQ) for rank in range(degree)):
        for other in (head_tail_pieces(rank, degree, SEQ) for rank in range(degree)):
            queries, keys = _places(own, places.device), _places(other, places.device)
            segments = (documents[:, queries], documents[:, keys]) if packed else None
            found = torch.zeros(2, len(queries), len(keys), dtype=torch.bool)
            for tile in _tiles(pattern, own, other):
                bias = _bias(pattern, segments, tile, own=own, other=other, query=torch.empty(0))
                block = found[:, tile.rows, tile.keys]
                shown = torch.ones_like(block) if bias is None else (bias[:, 0] == 0).expand_as(block)
                block |= shown.tril() if tile.kind == "causal" and bias is None else shown
                kinds.add(tile.kind)
            assert torch.equal(found, whole[:, queries][:, :, keys])
    assert "whole" in kinds or pattern == MaskPattern(5)
