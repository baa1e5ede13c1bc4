"""Every token of a sequence is one rank's, with its position, and the causal work is even."""

import pytest
import torch

from titan_exp.ops.attention.mask_pattern import MaskPattern
from titan_exp.parallel.context_parallel.attention import _chunks, _tiles
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


@pytest.mark.parametrize(
    ("pattern", "spread"), [(MaskPattern(), 0.01), (MaskPattern(chunk=32), 0.01), (MaskPattern(16), 0.15)]
)
def test_head_and_tail_is_even_work_within_windows_and_chunks(pattern: MaskPattern, spread: float):
    """Visible pairs: only the first tokens of the sequence see less than a window."""
    degree, seq = 4, 256
    half = seq // (2 * degree)
    pairs = [
        sum(pattern.visible_pairs(queries, range(seq)) for queries in _chunks(rank, degree, half))
        for rank in range(degree)
    ]
    assert sum(pairs) == pattern.visible_pairs(range(seq), range(seq))
    assert max(pairs) - min(pairs) <= spread * max(pairs)


@pytest.mark.parametrize(
    ("pattern", "seq", "spread"),
    [
        (MaskPattern(), 8192, 0.0),
        (MaskPattern(window=128), 8192, 0.01),
        (MaskPattern(window=1024), 8192, 0.1),
        (MaskPattern(chunk=8192), 32768, 0.0),
    ],
)
def test_computed_scores_of_published_masks_are_even(pattern: MaskPattern, seq: int, spread: float):
    """Scores that each rank's kernels compute; documents are masked within the tiles of their layer's pattern."""
    degree = 8
    computed = [
        sum(
            (tile.end_row - tile.first_row) * (tile.end_key - tile.first_key) / (1 + (tile.kind == "causal"))
            for other in range(degree)
            for tile in _tiles(pattern, rank, other, degree, seq // degree)
        )
        for rank in range(degree)
    ]
    assert max(computed) <= (1 + spread) * sum(computed) / degree


def test_blocks_beyond_the_window_are_skipped():
    """A window shorter than a chunk reaches one chunk back: that of rank 0 from the head, of rank 2 from the tail."""
    window, own = MaskPattern(16), range(4)
    computed = [other for other in own if list(_tiles(window, 1, other, 4, 64))]
    assert computed == [0, 1, 2]
    assert all(list(_tiles(MaskPattern(), 1, other, 4, 64)) for other in own)
