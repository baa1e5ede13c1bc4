"""Token exchange of balanced routing: numbers of rows for each rank."""

import pytest

from benchmarks.gpu.balanced_experts import balanced


@pytest.mark.parametrize(
    ("rows", "ranks", "parts"), [(8, 4, [2] * 4), (7, 3, [3, 2, 2]), (1, 2, [1, 0]), (0, 2, [0, 0])]
)
def test_ranks_get_as_many_rows(rows: int, ranks: int, parts: list[int]):
    assert balanced(rows, ranks) == parts
