"""The warm pool of ranks."""

import sys

from tests.ranks import PRELOAD, run_ranks


def test_a_rank_starts_with_the_trainer_loaded():
    assert run_ranks(1, _loaded) == [set(PRELOAD)]


def _loaded() -> set[str]:
    return set(PRELOAD) & sys.modules.keys()
