"""Largest logits by tiles are those of whole score matrices; clipped heads have exactly the limit."""

import pytest
import torch

from titan_exp.ops.attention import attention_with_lse
from titan_exp.ops.attention.attention_with_lse import MaxLogits
from titan_exp.ops.attention.sdpa import document_mask


@pytest.mark.parametrize("tile", [1, 100, 1 << 22])
@pytest.mark.parametrize("kind", ["causal", "documents", "all"])
def test_tiles_find_the_largest_visible_score(monkeypatch: pytest.MonkeyPatch, tile: int, kind: str):
    monkeypatch.setattr(attention_with_lse, "TILE_SCORES", tile)
    query, key = torch.randn(2, 6, 10, 4), torch.randn(2, 3, 10, 4)
    documents = torch.tensor([[0] * 4 + [1] * 6, [0] * 9 + [1]])
    visible = document_mask(documents) if kind == "documents" else None
    found = MaxLogits(6, "0", torch.device("cpu"))
    found(query, key, visible, causal=kind == "causal", scale=0.5)
    scores = 0.5 * query @ key.repeat_interleave(2, 1).transpose(2, 3)
    seen = torch.ones(10, 10, dtype=torch.bool).tril() if kind == "causal" else torch.ones(1, dtype=torch.bool)
    scores = scores.masked_fill(~(visible if visible is not None else seen), -torch.inf)
    torch.testing.assert_close(found.largest, scores.amax((0, 2, 3)))


def test_a_step_keeps_the_largest_of_its_forward_passes_in_training():
    found = MaxLogits(1, "0", torch.device("cpu"))
    ones = torch.ones(1, 1, 2, 4)
    for factor in (1, 3, 2):
        found(factor * ones, ones, None, causal=True, scale=1.0)
    with torch.no_grad():
        found(9 * ones, ones, None, causal=True, scale=1.0)
    assert found.largest.tolist() == [12]
    assert found.metrics() == {"max_logit": 12, "max_logit/0": 12}
    found.reset_metrics()
    assert found.largest.tolist() == [-torch.inf]
