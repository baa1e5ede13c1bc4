"""Every token of a sequence is one rank's, with its position, and the causal work is even."""

import pytest
import torch

from titan_exp.parallel.context_parallel.load_balance import SequenceShard, ShardedSequence


def local_shard(across: int, within: int, rank: int) -> ShardedSequence:
    return ShardedSequence(SequenceShard(across, rank // within, True), SequenceShard(within, rank % within, False))


@pytest.mark.parametrize(("across", "within"), [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (2, 4)])
def test_every_token_is_taken_once_with_its_position(across, within):
    tokens = torch.arange(64).reshape(2, 32)
    parts = [local_shard(across, within, rank) for rank in range(across * within)]
    taken = torch.cat([part.take(tokens) for part in parts], dim=1)
    positions = torch.cat([part.positions(tokens) for part in parts], dim=1)
    assert torch.equal(taken.sort(dim=1).values, tokens)
    assert torch.equal(tokens.gather(1, positions), taken)
    assert all(bool((part.positions(tokens).diff(dim=1) > 0).all()) for part in parts)


def test_groups_have_together_what_one_rank_has_otherwise():
    tokens = torch.arange(64).reshape(2, 32)
    together = [local_shard(2, 2, rank).take(tokens) for rank in (2, 3)]
    assert torch.equal(torch.cat(together, dim=1), local_shard(2, 1, 1).take(tokens))


def test_head_and_tail_is_even_work():
    tokens = torch.zeros(1, 32)
    work = [int((local_shard(4, 1, rank).positions(tokens) + 1).sum()) for rank in range(4)]
    assert len(set(work)) == 1
