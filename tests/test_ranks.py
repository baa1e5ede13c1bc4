"""The warm pool of ranks."""

import sys

from tests.ranks import run_ranks

SLOW_TO_IMPORT = {"torch.distributed.checkpoint", "titan_exp.trainer.trainer", "tests.warm"}


def test_a_rank_starts_with_the_trainer_loaded():
    assert run_ranks(1, _loaded) == [SLOW_TO_IMPORT]


def _loaded() -> set[str]:
    return SLOW_TO_IMPORT & sys.modules.keys()
