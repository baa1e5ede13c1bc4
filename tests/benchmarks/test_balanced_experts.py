"""Token exchange of balanced routing, whatever the counts are."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.memory import balanced, exchange_balanced
from tests.ranks import run_ranks
from titan_exp.trainer.distributed import joined_process_group


@pytest.mark.parametrize(
    ("rows", "ranks", "parts"), [(8, 4, [2] * 4), (7, 3, [3, 2, 2]), (1, 2, [1, 0]), (0, 2, [0, 0])]
)
def test_ranks_get_as_many_rows(rows: int, ranks: int, parts: list[int]):
    assert balanced(rows, ranks) == parts


def exchanged() -> list[list[int]]:
    """Rows of this rank after an exchange of four, with counts of zero."""
    with joined_process_group(torch.device("cpu")):
        assert dist.group.WORLD is not None
        rows, counts = torch.arange(4)[:, None] + 10 * dist.get_rank(), torch.zeros(2, dtype=torch.int64)
        found = [exchange_balanced(rows, counts, counts, size, dist.group.WORLD.group_name) for size in (None, 4)]
    return [part.flatten().tolist() for part in found]


def test_rows_are_exchanged_whatever_the_counts_are():
    assert run_ranks(2, exchanged) == [[[0, 1, 10, 11]] * 2, [[2, 3, 12, 13]] * 2]
