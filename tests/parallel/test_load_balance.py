"""Every token of a sequence is one rank's, with its position, and the work that masks leave is even."""

import pytest
import torch

from tests.config.composing import experiment
from titan_exp.models.spec.lookup import model_spec
from titan_exp.ops.attention.mask_pattern import MaskPattern, Tile
from titan_exp.parallel.context_parallel.attention import _tiles
from titan_exp.parallel.context_parallel.load_balance import (
    EVEN,
    SequenceShard,
    ShardedSequence,
    even_cuts,
    head_tail_pieces,
    sequence_cuts,
)


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


def test_every_token_is_taken_once_between_cuts():
    tokens = torch.arange(96)[None]
    parts = [SequenceShard(2, rank, True, cuts=(32, 80)) for rank in range(2)]
    assert torch.equal(torch.cat([part.take(tokens) for part in parts], dim=1).sort().values, tokens)
    assert parts[1].take(tokens)[0].tolist() == [*range(8, 24), *range(44, 68), *range(84, 92)]


def computed(pattern: MaskPattern, seq: int, degree: int, cuts: tuple[int, ...]) -> list[float]:
    """Scores that each rank's kernels compute; documents are masked within the tiles of their layer's pattern."""
    parts = [head_tail_pieces(rank, degree, seq, cuts) for rank in range(degree)]
    return [
        sum(
            (tile.end_row - tile.first_row) * (tile.end_key - tile.first_key) / (1 + (tile.kind == "causal"))
            for other in parts
            for tile in _tiles(pattern, own, other)
        )
        for own in parts
    ]


@pytest.mark.parametrize("degree", [2, 4, 16])
@pytest.mark.parametrize(
    ("pattern", "seq", "head_tail"),
    [
        (MaskPattern(), 8192, 0.0),
        (MaskPattern(window=128), 8192, 0.01),
        (MaskPattern(window=1024), 8192, 0.07),
        (MaskPattern(window=4096), 8192, 0.14),
        (MaskPattern(window=3000), 32768, 0.04),
        (MaskPattern(chunk=8192), 32768, 0.0),
        (MaskPattern(chunk=6000), 8192, 0.56),
        (MaskPattern(chunk=6000), 32768, 0.1),
    ],
    ids=str,
)
def test_computed_scores_are_even_after_cuts(pattern: MaskPattern, seq: int, degree: int, head_tail: float):
    """`head_tail`: excess of the busiest rank over the mean at least, without a cut."""
    pattern = pattern.within(seq)
    cuts = even_cuts([pattern], seq, degree)
    before, after = (
        max(found) * degree / sum(found) - 1
        for found in (computed(pattern, seq, degree, ()), computed(pattern, seq, degree, cuts))
    )
    assert bool(cuts) == (head_tail > EVEN)
    assert before >= head_tail - 0.01 if cuts else after == before
    assert after <= 0.025


@pytest.mark.parametrize("name", ["gpt_oss_20b", "llama4_scout"])
def test_published_mixtures_of_layers_need_no_cut(name: str):
    """Their windows are short, and chunks divide the sequence."""
    made = experiment(f"model={name}", "parallelism.cp=8", "parallelism.dp_shard=1")
    assert [sequence_cuts(model_spec(made.model), made.parallelism, seq) for seq in (8192, 131072)] == [()] * 2


def test_one_cut_is_even_for_layers_of_two_masks():
    patterns = [MaskPattern(chunk=3000), MaskPattern()]
    cuts = even_cuts(patterns, 16384, 8)
    found = [computed(pattern, 16384, 8, cuts) for pattern in patterns]
    assert len(cuts) == 1
    assert sum(map(max, found)) * 8 / sum(map(sum, found)) < 1 + EVEN


def test_blocks_beyond_the_window_are_skipped():
    """A window shorter than a piece reaches one piece back: that of rank 0 from the head, of rank 2 from the tail."""
    parts = [head_tail_pieces(rank, 4, 256) for rank in range(4)]
    assert [other for other in range(4) if list(_tiles(MaskPattern(16), parts[1], parts[other]))] == [0, 1, 2]
    assert all(list(_tiles(MaskPattern(), parts[1], other)) for other in parts)


def test_causal_tiles_of_one_segment_are_halves():
    """No tile more than head-tail sharding needs, whatever the number of ranks."""
    parts = [head_tail_pieces(rank, 4, 64) for rank in range(4)]
    found = [list(_tiles(MaskPattern(), parts[1], other)) for other in parts]
    assert found == [
        [Tile(0, 16, 0, 8, "whole")],
        [Tile(0, 16, 0, 16, "causal")],
        *([[Tile(8, 16, 0, 16, "whole")]] * 2),
    ]
