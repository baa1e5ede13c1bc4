"""Every token of a sequence is one rank's, with its position, and the causal work is even."""

import pytest
import torch

from titan_exp.parallel.sequence import SequencePart


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("head_and_tail", [True, False])
def test_every_token_is_taken_once_with_its_position(degree, head_and_tail):
    tokens = torch.arange(48).reshape(2, 24)[:, : 24 // (2 * degree) * 2 * degree]
    parts = [SequencePart(degree, rank, head_and_tail) for rank in range(degree)]
    taken = torch.cat([part.take(tokens) for part in parts], dim=1)
    positions = torch.cat([part.positions(tokens) for part in parts], dim=1)
    assert torch.equal(taken.sort(dim=1).values, tokens)
    assert torch.equal(tokens.gather(1, positions), taken)
    assert all(bool((part.positions(tokens).diff(dim=1) > 0).all()) for part in parts)


def test_head_and_tail_is_even_work():
    tokens = torch.zeros(1, 32)
    work = [int((SequencePart(4, rank, head_and_tail=True).positions(tokens) + 1).sum()) for rank in range(4)]
    assert len(set(work)) == 1
